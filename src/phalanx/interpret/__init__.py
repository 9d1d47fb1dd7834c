"""The view of a model on a text: losses of tokens, guesses of layers, and the nearest training documents."""
