"""Asynchronous, bulk and tensor copies."""
