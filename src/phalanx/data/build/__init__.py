"""A dataset from a recipe: pieces that any process can do, resumable at any kill, every byte accounted for."""
