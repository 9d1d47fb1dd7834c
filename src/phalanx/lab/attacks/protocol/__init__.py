"""Lies in the protocol itself: false receipts, contradictions, silence, accusations, collusion."""
