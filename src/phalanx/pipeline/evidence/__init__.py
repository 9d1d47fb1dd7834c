"""Evidence of verdicts: written to files, read, and checked again offline."""
