"""`sdsa verify`: its command and its document."""
