"""Attacks on a trained model, by the person who must decide whether it may be given away."""
