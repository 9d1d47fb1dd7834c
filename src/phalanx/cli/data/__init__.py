"""Commands about datasets of token shards, listed by `group.py`, and about vocabularies."""
