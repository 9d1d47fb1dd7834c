"""Context parallelism: attention over a sequence that several ranks share."""
