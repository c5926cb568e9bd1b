"""``sdsa score``: score query rows against a cache."""
