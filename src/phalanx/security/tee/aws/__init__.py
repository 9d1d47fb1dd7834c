"""Nitro Enclaves: attestation documents, and the module that gives them."""
