"""Small PTX kernels whose outputs were recorded on an H200: what the emulator must reproduce.

`all_probes` gives them, `record.py` runs them on a GPU.
"""
