"""Verbs of those who serve a model: keys of callers, the gateway."""
