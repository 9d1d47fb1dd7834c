"""The chaos benches: what dying workers cost a run in lost work, time to recover and goodput."""
