"""A client and an enclave of other owners than the run's: their own files, and their processes."""
