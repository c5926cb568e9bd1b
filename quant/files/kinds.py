"""What the headers of this project's files call them, asked without anything else of the files."""

from __future__ import annotations

CACHE = "sdsa-cache"
SCORES = "sdsa-scores"
