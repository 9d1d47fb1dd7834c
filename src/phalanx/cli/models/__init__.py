"""Commands about weights on disk: a run's checkpoints, and directories of the hub's layout."""
