"""Ranks among each other: environment, rendezvous, mesh, heartbeat, exchanges."""
