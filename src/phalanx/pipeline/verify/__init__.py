"""Verification at the owner: claims, audits, states and links, and the referee of disputes."""
