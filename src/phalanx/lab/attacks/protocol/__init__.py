"""Lies in the protocol itself: false receipts, two stories, silence, accusations, leagues."""
