"""Checks for strangers: passports, logs, evidence, data sets and proofs, with cryptography and blake3 alone."""
