"""What a run leaves behind, and what that proves: its directory, logs, journal, summary."""
