"""Verbs about the parties of a run: their keys, invitations and joining."""
