"""Benches: measure on this machine, side by side, and give one JSON object of flat rows each."""

from collections.abc import Callable
from typing import Any

from phalanx.bench.detection import bench_detection
from phalanx.bench.pipeline import bench_pipeline

BENCHES: dict[str, Callable[[bool], dict[str, Any]]] = {"detection": bench_detection, "pipeline": bench_pipeline}

__all__ = ["BENCHES", "bench_detection", "bench_pipeline"]
