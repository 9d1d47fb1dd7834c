"""The attested aggregator: what opens sites' updates in an enclave, and lets one update out of it."""
