"""The assignment of stages to holders and shadows, and its memory and messages."""
