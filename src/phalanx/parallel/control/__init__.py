"""What ranks are told to do, and do in step: rank 0, every rank, their processes, saving."""
