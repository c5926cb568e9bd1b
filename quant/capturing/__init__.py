"""Captures of what a model's indexers score and select, streamed to files and checked."""
