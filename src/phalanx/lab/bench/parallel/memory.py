"""``phalanx bench memory``: the peak memory of each rank of a layout, beside the planner's estimate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.lab.bench.measure.workloads import prepare_run
from phalanx.lab.bench.parallel.arms import ENGINE
from phalanx.lab.bench.parallel.interleave import TurnSpec, train_crew
from phalanx.lab.bench.parallel.layouts import layout_name, small_run
from phalanx.lab.bench.parallel.parallel_plan import plan_memory
from phalanx.lab.bench.parallel.ranks import RankForkServer
from phalanx.models import LoraConfig
from phalanx.parallel import ParallelConfig
from phalanx.train import PipelineRun

_STEPS = 2
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"dp": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3},
    {"dp": 2, "zero": 2, "offload": True},
    {"dp": 2, "zero": 3, "offload": True},
    {"dp": 2, "pp": 2, "zero": 3},
    {"dp": 4, "zero": 1},
    {"dp": 4, "zero": 2},
    {"dp": 4, "zero": 3},
    {"tp": 2},
    {"pp": 2},
    {"dp": 2, "tp": 2, "zero": 3},
    {"dp": 2, "pp": 2, "zero": 1},
    {"dp": 4, "zero": 3, "replicas": 2},
    {"dp": 4, "zero": 1, "outer": {"every": 1, "islands": 2, "compression": "int8"}},
)
_ADAPTED: tuple[dict[str, Any], ...] = ({}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"tp": 2})
"""Layouts that are measured with adapters beside frozen weights as well."""
_NUM_QUICK = 8
_WIDTH = 640

Row = dict[str, Any]


def bench_memory(quick: bool) -> dict[str, Any]:
    """Measure each layout on a model of 42 million parameters; other work on the machine changes no figure."""
    run = large_run()
    cases = [(run, keys) for keys in _LAYOUTS[: _NUM_QUICK if quick else None]]
    cases += [] if quick else [(with_adapters(run), keys) for keys in _ADAPTED]
    return measure_memory([(case_run, ParallelConfig.model_validate(keys)) for case_run, keys in cases], quick=quick)


def large_run(width: int = _WIDTH) -> PipelineRun:
    """Return a run with a model that outweighs all else in its process, and short sequences."""
    run = small_run()
    architecture = {**(run.model.architecture or {}), "n_embd": width}
    return run.model_copy(
        update={
            "model": run.model.model_copy(update={"architecture": architecture}),
            "train": run.train.model_copy(update={"batch_size": 8, "microbatches": 2}),
        }
    )


def with_adapters(run: PipelineRun) -> PipelineRun:
    """The same run, of which adapters alone are trained."""
    return run.model_copy(update={"model": run.model.model_copy(update={"adapter": LoraConfig()})})


def measure_memory(cases: Sequence[tuple[PipelineRun, ParallelConfig]], *, quick: bool) -> dict[str, Any]:
    """Measure runs, which differ in nothing but adapters, on their layouts; see `bench_memory`."""
    load = load_average()
    cache, rows = cache_directory(), list[Row]()
    prepare_run(cases[0][0], cache)
    with scratch_directory() as directory, RankForkServer(directory) as host:
        for case_run, config in cases:
            name = layout_name(config) + (" with adapters" if case_run.model.adapter is not None else "")
            figures = memory_row(host, ENGINE, case_run, config, cache)
            rows.append({"layout": name, "ranks": config.num_ranks, **figures, **_planned_parts(case_run, config)})
            print_progress(f"memory: {name}: planned / measured {figures['memory_ratio']:.3f}")
    return {
        **bench_head("memory", load, quick=quick),
        "rows": rows,
    }


def measure_peak(host: RankForkServer, spec: TurnSpec, run: PipelineRun, cache: Path) -> int:
    """Train the steps of a turn and return the memory in bytes that the neediest rank added to its process."""
    with train_crew(host, spec, run, cache, measures_memory=True) as crew:
        answers = crew.ask_all(steps=spec.steps)
    peaks: list[int] = [answer["peak_bytes"] for answer in answers]
    if None in peaks:
        raise TrainingError(f"bench: {layout_name(spec.config)}: a rank did not tell its memory")
    return max(peaks)


def memory_row(host: RankForkServer, arm: str, run: PipelineRun, config: ParallelConfig, cache: Path) -> Row:
    """Train a few steps and return the memory that the neediest rank added to its process, beside the plan.

    On a CPU offloaded tensors lie in the same memory, so that the plan is that of the same layout without it.
    """
    peak = measure_peak(host, TurnSpec(arm, config, _STEPS), run, cache)
    total = plan_memory(run, config).total_bytes
    is_engine = arm == ENGINE
    return {
        "peak_memory_bytes": peak,
        "planned_memory_bytes": total if is_engine else None,
        "memory_ratio": total / peak if is_engine else None,
    }


def _planned_parts(run: PipelineRun, config: ParallelConfig) -> Row:
    planned = plan_memory(run, config)
    return {f"planned_{name}": size for name, size in planned.parts_by_name().items()}
