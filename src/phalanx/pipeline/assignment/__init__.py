"""The assignment of stages to holders and shadows, and what it takes in memory and messages."""
