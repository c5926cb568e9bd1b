"""What models select by: the scores of indexers with several heads, and their choice of blocks."""
