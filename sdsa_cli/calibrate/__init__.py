"""`sdsa calibrate`: its command and its document."""
