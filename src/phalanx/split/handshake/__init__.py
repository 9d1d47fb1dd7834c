"""How client and enclave come to trust each other."""
