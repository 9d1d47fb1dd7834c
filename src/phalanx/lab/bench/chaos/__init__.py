"""What dying workers cost a run: lost work, time to recover, goodput."""
