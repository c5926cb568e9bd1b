"""`sdsa convert`: its command and its document."""
