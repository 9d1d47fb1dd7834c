"""Benches of serving: marks in texts and filters of texts."""
