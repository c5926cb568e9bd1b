"""`sdsa eval`: its command and its document."""
