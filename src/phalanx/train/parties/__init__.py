"""A client and an enclave of other owners than the run's: what each is told by its own file, and what it then does."""
