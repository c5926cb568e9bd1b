"""Scoring a whole cache in chunks, with its accuracy and timing."""
