"""The records of a run, and what they prove: its directory, logs, journal, summary."""
