"""The `sdsa` command."""

__version__ = "0.1.0"
