"""Captured keys, query rows and baselines: which tensors they are and how they are read."""
