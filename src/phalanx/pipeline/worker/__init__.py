"""The work of every party, the owner included: serve stages, shadow others, audit, answer requests."""
