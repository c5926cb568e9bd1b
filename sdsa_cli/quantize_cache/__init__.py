"""``sdsa quantize-cache``: captured keys to paged cache files."""
