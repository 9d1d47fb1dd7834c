"""What all benches share: this machine, its clocks, the models they run, and rows on disk."""
