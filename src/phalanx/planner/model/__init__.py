"""The planner's facts about a model and its training: shapes, matrices, activations, operations."""
