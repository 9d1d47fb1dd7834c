"""Which clients an enclave learns from: the section of the run file, and the standings of clients; no tensors."""
