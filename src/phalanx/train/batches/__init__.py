"""Batches and scores of a run, beyond plain text."""
