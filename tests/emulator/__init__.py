"""A functional emulator of PTX kernels; test code only (see README.md)."""
