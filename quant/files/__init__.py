"""Cache, scores and other files: safetensors read, checked and written atomically."""
