"""Checkpoints of a run: when they are taken, their contents, and going back to one."""
