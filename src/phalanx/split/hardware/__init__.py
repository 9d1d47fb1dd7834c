"""The hardware behind an enclave: tiers, its measurement, its TPM, its sealed states."""
