"""The detection benches: which attacks are found, in which step, and whether an honest party is evicted."""
