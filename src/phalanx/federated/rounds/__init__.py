"""Rounds: orders of the owner, answers of sites, and the outcome of a round."""
