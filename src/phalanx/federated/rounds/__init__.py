"""Rounds: what the owner asks, what a site answers, and what a round comes to."""
