"""Backend ``triton``: scoring and quantizing kernels for every GPU from SM80 on."""
