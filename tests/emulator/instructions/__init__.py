"""PTX instructions to closures."""
