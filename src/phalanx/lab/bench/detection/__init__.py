"""Which liars are found, when, and whether an honest party is accused."""
