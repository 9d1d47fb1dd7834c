"""One rank's part of the model, and how it is computed."""
