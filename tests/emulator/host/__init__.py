"""Launches of real host code, recorded without a GPU."""
