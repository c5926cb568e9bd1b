"""Timing in CUDA graphs, the roofs beside it, and the bytes that are moved."""
