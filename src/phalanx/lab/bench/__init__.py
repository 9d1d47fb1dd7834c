"""Benches: measure on this machine, side by side, and give one JSON object of flat rows each."""

from collections.abc import Callable
from typing import Any

from phalanx.lab.bench.chaos.chaos import bench_chaos
from phalanx.lab.bench.chaos.spot import bench_spot, bench_spot_processes
from phalanx.lab.bench.data.data import bench_data
from phalanx.lab.bench.detection.detection import (
    bench_detection,
    bench_detection_economy,
    bench_detection_exact,
)
from phalanx.lab.bench.detection.detection_processes import bench_detection_processes
from phalanx.lab.bench.federated.federated import bench_federated
from phalanx.lab.bench.overhead.checkpoint import bench_checkpoint
from phalanx.lab.bench.overhead.overhead import bench_overhead
from phalanx.lab.bench.overhead.overhead_law import bench_overhead_law
from phalanx.lab.bench.overhead.pipeline import bench_pipeline
from phalanx.lab.bench.overhead.split import bench_split
from phalanx.lab.bench.overhead.wall_time import bench_wall_time
from phalanx.lab.bench.parallel.collectives import bench_collectives
from phalanx.lab.bench.parallel.memory import bench_memory
from phalanx.lab.bench.parallel.parallel import bench_parallel
from phalanx.lab.bench.posttrain.posttrain import bench_posttrain
from phalanx.lab.bench.serving.alerts import bench_alerts
from phalanx.lab.bench.serving.export import bench_export, bench_planted_rounding
from phalanx.lab.bench.serving.filters import bench_filters
from phalanx.lab.bench.serving.marks import bench_marks
from phalanx.lab.bench.serving.paraphrases import bench_paraphrases
from phalanx.lab.bench.serving.serve import bench_gateway, bench_serve

BENCHES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "alerts": bench_alerts,
    "chaos": bench_chaos,
    "checkpoint": bench_checkpoint,
    "collectives": bench_collectives,
    "data": bench_data,
    "detection": bench_detection,
    "detection-economy": bench_detection_economy,
    "detection-exact": bench_detection_exact,
    "detection-processes": bench_detection_processes,
    "export": bench_export,
    "federated": bench_federated,
    "filters": bench_filters,
    "gateway": bench_gateway,
    "mark-paraphrases": bench_paraphrases,
    "marks": bench_marks,
    "memory": bench_memory,
    "overhead": bench_overhead,
    "overhead-law": bench_overhead_law,
    "parallel": bench_parallel,
    "pipeline": bench_pipeline,
    "planted-rounding": bench_planted_rounding,
    "posttrain": bench_posttrain,
    "serve": bench_serve,
    "split": bench_split,
    "spot": bench_spot,
    "spot-processes": bench_spot_processes,
    "wall-time": bench_wall_time,
}

KEEPING_ROWS: dict[str, Callable[[bool, bool], dict[str, Any]]] = {
    "chaos": bench_chaos,
    "detection": bench_detection,
    "detection-economy": bench_detection_economy,
    "detection-exact": bench_detection_exact,
    "detection-processes": bench_detection_processes,
    "export": bench_export,
    "overhead-law": bench_overhead_law,
    "parallel": bench_parallel,
    "planted-rounding": bench_planted_rounding,
}
"""Benches that go on where they were interrupted, and can show what is finished: the second argument."""
