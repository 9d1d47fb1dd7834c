"""Tensor parallelism: matrices and vocabularies that several ranks share."""
