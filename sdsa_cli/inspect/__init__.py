"""``sdsa inspect``: what a file holds, and whether a cache is valid."""
