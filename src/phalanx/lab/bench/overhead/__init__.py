"""The overhead benches: costs of the pipeline, its guard, checkpoints and a split beside a run without them."""
