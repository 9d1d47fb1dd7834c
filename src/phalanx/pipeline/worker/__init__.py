"""What every party does, the owner included: serve stages, shadow others, audit, answer requests."""
