"""The handshake by which client and enclave come to trust each other."""
