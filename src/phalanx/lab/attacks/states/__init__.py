"""Lies about what a stage keeps and computes with: gradients, updates, weights, backdoors."""
