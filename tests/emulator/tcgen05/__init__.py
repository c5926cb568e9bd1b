"""Tensor memory, and the instructions of SM10x tensor cores."""
