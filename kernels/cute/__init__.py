"""Backend ``cute``: CuTe DSL kernels, compiled, cached, loaded and launched."""
