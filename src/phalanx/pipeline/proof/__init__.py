"""Proofs that applied steps were audited, and their check from the audit log alone."""
