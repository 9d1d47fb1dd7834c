"""The loop's engine over a domain's ranks, and over clients and an enclave."""
