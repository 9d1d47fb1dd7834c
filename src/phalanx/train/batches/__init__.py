"""What a run trains on and is scored by, beyond plain text."""
