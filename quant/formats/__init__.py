"""Number formats of keys (NVFP4, MXFP4, FP8), scale orders and transforms, bit for bit."""
