"""Nothing to run: whether a program can be confined here shows before its first line."""
