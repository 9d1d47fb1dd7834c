"""``phalanx bench overhead``: the cost of each guard beside an unguarded run of the same stages and microbatches."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.lab.bench.measure.process_clock import peak_memory_bytes
from phalanx.lab.bench.measure.workloads import prepare_run
from phalanx.lab.bench.overhead.arm import ArmProcess, ArmSpec
from phalanx.lab.bench.overhead.overhead_arms import InterleavedGuards, overhead_shifts
from phalanx.lab.bench.overhead.overhead_rows import RunShape, extrapolate_rows, overhead_rows
from phalanx.lab.bench.overhead.rows import ArmMeasurement, Row
from phalanx.models import ModelSource, estimate_costs
from phalanx.train.setup.stage_table import estimate_stages


def bench_overhead(quick: bool) -> dict[str, Any]:
    """Measure every shift, one after the other; progress goes to standard error."""
    return measure_overhead(overhead_shifts(quick), quick=quick)


def measure_overhead(what: Sequence[InterleavedGuards], *, quick: bool) -> dict[str, Any]:
    """Measure these shifts; see `bench_overhead`."""
    load = load_average()
    rows: list[Row] = []
    for shift in what:
        with scratch_directory() as directory:
            rows += _measure_shift(shift, directory)
    return {
        **bench_head("overhead", load, quick=quick),
        "extrapolated": extrapolate_rows(),
        "rows": rows,
    }


def _measure_shift(shift: InterleavedGuards, directory: Path) -> list[Row]:
    with _open_arms(shift, directory) as (source, crew):
        measured = _take_turns(shift, crew)
        memory = {arm: peak_memory_bytes(process.pids) for arm, process in crew.items()}
        # last of all: it ends what is measured from outside
        guarded = [arm for arm, guard in shift.guards_by_arm.items() if guard.is_enabled]
        losses = {arm: crew[arm].lose_worker(shift.run.pipeline.worker_names[0]) for arm in guarded}
    return overhead_rows(shift.guards_by_arm, measured, memory, _run_shape(shift, source), losses)


@contextlib.contextmanager
def _open_arms(shift: InterleavedGuards, directory: Path) -> Iterator[tuple[ModelSource, dict[str, ArmProcess]]]:
    run = shift.run
    cache = cache_directory()
    source, _ = prepare_run(run, cache)
    with contextlib.ExitStack() as stack:
        crew: dict[str, ArmProcess] = {}
        for arm, guard in shift.guards_by_arm.items():
            spec = ArmSpec(
                arm=arm,
                plain=False,
                run=run.model_copy(update={"guard": guard}),
                directory=str(directory / arm),
                cache=str(cache.resolve()),
            )
            crew[arm] = stack.enter_context(ArmProcess(spec, {"OMP_NUM_THREADS": "1"}))
            print_progress(f"{_shift_name(shift)}: {arm} is ready")
        yield source, crew


def _shift_name(shift: InterleavedGuards) -> str:
    return f"{shift.model}, K = {shift.run.pipeline.stages}, M = {shift.run.train.microbatches}"


def _take_turns(shift: InterleavedGuards, crew: dict[str, ArmProcess]) -> dict[str, ArmMeasurement]:
    arms, name = {arm: ArmMeasurement() for arm in crew}, _shift_name(shift)
    started = time.monotonic()
    for turn in range(shift.warm_ups + shift.rounds):
        if turn > shift.warm_ups and time.monotonic() - started > shift.budget_s:
            print_progress(f"{name}: the time is up after {turn - shift.warm_ups} rounds")
            break
        for arm, measured in arms.items():
            block = crew[arm].run_steps(shift.steps)
            if turn >= shift.warm_ups:
                measured.blocks.append(block)
            else:
                measured.before = block.report.usage
        print_progress(f"{name}: turn {turn + 1} of {shift.warm_ups + shift.rounds}")
    return arms


def _run_shape(shift: InterleavedGuards, source: ModelSource) -> RunShape:
    run = shift.run
    stages = estimate_stages(run, source)
    watched = [stage for stage in stages if 0 < stage.index < len(stages) - 1]
    first, last = (int(text) for text in (watched[0].layers.split("-")[0], watched[-1].layers.split("-")[1]))
    return RunShape(
        model=shift.model,
        stages=len(stages),
        microbatches=run.train.microbatches,
        num_untrusted=len(watched),
        untrusted_share=(last - first + 1) / (source.num_layers + sum(estimate_costs(source.hub_config))),
        trained_untrusted=sum(stage.trainable for stage in watched),
    )
