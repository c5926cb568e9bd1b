"""The kernels of the tensor cores of an SM10x."""
