"""Selection in a prefill: query rows in tiles of 128, each row with its own end."""
