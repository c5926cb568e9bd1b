"""Caches and selections as inference engines hold them: decoded, converted, and checked."""
