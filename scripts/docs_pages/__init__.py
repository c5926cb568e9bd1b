"""What `scripts/docs` makes of the code and of the recorded measurements: tables, pages, pictures.

A page says where a made part goes:

    <!-- made by scripts/docs: name -->
    ...
    <!-- end -->

`registry` lists the names and what makes each one; `pages` writes or compares.
"""
