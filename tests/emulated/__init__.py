"""This project's kernels, run in the emulator."""
