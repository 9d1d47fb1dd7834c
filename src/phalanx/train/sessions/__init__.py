"""One run from its file to its summary: a verified pipeline, a domain's ranks, or clients and an enclave."""
