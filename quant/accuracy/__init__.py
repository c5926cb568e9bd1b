"""Accuracy of scores and of quantized blocks, as defined once for the whole project."""
