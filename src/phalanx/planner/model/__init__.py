"""What the planner must know of a model and its training: shapes, matrices, activations, operations."""
