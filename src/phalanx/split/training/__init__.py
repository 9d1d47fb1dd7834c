"""The two parts of a model and how the back part is trained and released."""
