"""The overhead benches: what the pipeline, its guard, checkpoints and a split cost beside a run without them."""
