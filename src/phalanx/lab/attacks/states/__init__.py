"""Lies about the state of a stage: gradients, updates, weights, backdoors."""
