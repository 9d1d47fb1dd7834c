"""Commands about datasets of token shards; `group.py` lists them."""
