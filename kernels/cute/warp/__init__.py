"""The warp-level kernel, for every architecture from SM90 on."""
