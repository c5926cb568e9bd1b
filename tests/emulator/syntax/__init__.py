"""PTX text to modules, functions and instructions."""
