"""The guard in a plan: what verification and sealing cost and find, from measured figures."""
