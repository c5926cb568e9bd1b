"""Number formats, and rounding once in every mode."""
