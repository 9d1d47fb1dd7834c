"""What a model makes of a text: its loss at each token, its guess at each layer, and the nearest documents."""
