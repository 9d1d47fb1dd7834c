"""The control of ranks: rank 0, which tells them what to do in step, every rank, their processes, saving."""
