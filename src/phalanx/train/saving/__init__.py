"""Checkpoints of a run: when they are taken, what is in them, and going back to one."""
