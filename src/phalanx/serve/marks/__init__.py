"""Marked text: drawn by a secret key so that its holder finds it again."""
