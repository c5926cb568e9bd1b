"""Studies: what formats and transforms do to the ranking of every layer of a capture."""
