"""Lies about tensors between stages."""
