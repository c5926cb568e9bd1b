"""``sdsa bench``: time scoring over a table of shapes."""
