"""Carriers: what brings the owner's orders to sites and their replies back; one file each."""
