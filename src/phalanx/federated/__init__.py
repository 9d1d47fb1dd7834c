"""Federated rounds: many sites train, and one update comes of theirs.

aggregators/     robust rules, some before-steps, and their tables
"""
