"""``sdsa study``, ``report`` and ``compare``: what formats would do to a model's top-k."""
