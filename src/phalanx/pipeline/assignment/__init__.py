"""Which party holds and shadows which stage, and what that takes in memory and messages."""
