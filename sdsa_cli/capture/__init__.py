"""`sdsa capture`: its command and its document."""
