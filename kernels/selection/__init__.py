"""Selection: a row's `k` first keys in the one order of the project, in ascending key index."""
