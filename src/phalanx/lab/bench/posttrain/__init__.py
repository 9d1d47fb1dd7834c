"""The bench of post-training: fine-tuning and preferences beside TRL on the same rows, and under the guard."""
