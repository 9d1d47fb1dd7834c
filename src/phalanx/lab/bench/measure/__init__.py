"""The common part of all benches: this machine, its clocks, the models they run, and rows on disk."""
