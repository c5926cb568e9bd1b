"""Small kernels for the emulator's tests."""
