"""Benches: measure on this machine, side by side, and give one JSON object of flat rows each."""

from collections.abc import Callable
from typing import Any

from phalanx.bench.detection import bench_detection
from phalanx.bench.overhead import bench_overhead
from phalanx.bench.pipeline import bench_pipeline

BENCHES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "detection": bench_detection,
    "overhead": bench_overhead,
    "pipeline": bench_pipeline,
}

__all__ = ["BENCHES", "bench_detection", "bench_overhead", "bench_pipeline"]
