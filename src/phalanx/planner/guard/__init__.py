"""What verification and sealing cost and find, from measured figures."""
