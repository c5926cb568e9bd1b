"""The `sdsa` command."""

from sdsa_quant import __version__ as __version__
