"""Tests in this folder run Triton kernels in its interpreter, in a process that was told so before
it imported Triton (`test_triton_interpreter.py` starts it)."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
