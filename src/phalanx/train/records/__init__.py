"""The records of a run, and their proofs: its directory, logs, journal, summary."""
