"""``phalanx bench parallel``: layouts of a few ranks beside one plain process, peers and the planner, in one run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import code_version, describe_machine, load_average
from phalanx.lab.bench.measure.row_file import RowFile
from phalanx.lab.bench.measure.workloads import prepare_run
from phalanx.lab.bench.parallel.arms import ALONE, ENGINE
from phalanx.lab.bench.parallel.interleave import LayoutTurns, TurnSpec, take_turns
from phalanx.lab.bench.parallel.layouts import SHIFTS, InterleavedLayouts, layout_name, small_run
from phalanx.lab.bench.parallel.memory import memory_row
from phalanx.lab.bench.parallel.own_cluster import Probe, cluster_of, probe_machine
from phalanx.lab.bench.parallel.parallel_plan import compare_with_plan, plan_layout
from phalanx.lab.bench.parallel.ranks import RankForkServer
from phalanx.parallel import ParallelConfig
from phalanx.train import PipelineRun

PROTOCOL = 2
"""To be raised when a figure comes to mean something else; the commit is in every key as well."""
PRELOADED = (
    "phalanx.lab.bench.parallel.rank_training",
    "phalanx.lab.bench.parallel.rank_probe",
    "phalanx.lab.bench.parallel.rank_stream",
    "transformers.models.gpt2.modeling_gpt2",
)
_TURN_STEPS, _ALONE_STEPS = 4, 1
_QUICK_STEPS = 8

Row = dict[str, Any]


def bench_parallel(quick: bool, only_finished: bool = False) -> dict[str, Any]:
    """Measure each layout for 20 steps; progress goes to standard error. What is finished is kept.

    Args:
        quick: 8 steps, and no lossy layouts: end within 10 minutes on 2 cores.
        only_finished: Run nothing; show what earlier calls with the same code have finished.

    Returns:
        name, machine, load, rows, the block ``plan`` and the number of missing shifts; unmeasured values are None.
    """
    cache = cache_directory()
    what = [shift for shift in SHIFTS if not (quick and shift.lossy)]
    run, code = small_run(), code_version()
    if quick:
        run = run.model_copy(update={"train": run.train.model_copy(update={"steps": _QUICK_STEPS})})
    finished = open_layout_rows(cache / "bench" / "parallel.jsonl", run, code)
    return measure_parallel(what, run, finished, cache, quick=quick, only_finished=only_finished)


def open_layout_rows(path: Path, run: PipelineRun, code: str) -> RowFile[InterleavedLayouts]:
    """Shifts that were measured by this very code."""
    return RowFile(path, lambda shift: [PROTOCOL, code, run.model_dump(mode="json"), asdict(shift)])


def measure_parallel(
    what: Sequence[InterleavedLayouts],
    run: PipelineRun,
    finished: RowFile[InterleavedLayouts],
    cache: Path,
    *,
    quick: bool,
    only_finished: bool = False,
) -> dict[str, Any]:
    """Measure the unfinished shifts; see `bench_parallel`."""
    # memory can be measured while the machine has other work, so it comes last
    weighed = [replace(shift, memory=True) for shift in what]
    missing = [shift for shift in (*what, *weighed) if finished.find_row(shift) is None]
    if missing and not only_finished:
        with scratch_directory() as directory:
            _ParallelBench(run, cache, directory, finished).measure_shifts(missing)
    stored_shifts = [row for shift in what if (row := finished.find_row(shift)) is not None]
    memory = {
        key: figures
        for shift in weighed
        for key, figures in (finished.find_row(shift) or {"memory": {}})["memory"].items()
    }
    return {
        "name": "parallel",
        "quick": quick,
        "command": f"phalanx bench parallel --json{' --quick' if quick else ''}",
        "machine": describe_machine(),
        "steps": run.train.steps,
        "missing": len(what) - len(stored_shifts),
        "load": [row["load"] for row in stored_shifts],
        "rows": [
            {**row, **memory.get(_arm_key(row["arm"], row["layout"]), {})}
            for stored in stored_shifts
            for row in stored["rows"]
        ],
        "plan": [row for stored in stored_shifts for row in stored["plan"]],
        "clusters": [stored["cluster"] for stored in stored_shifts],
    }


class _ParallelBench:
    """A runner of shifts, one after the other; the machine is probed before the first one."""

    def __init__(self, run: PipelineRun, cache: Path, directory: Path, finished: RowFile[InterleavedLayouts]) -> None:
        self._run, self._cache, self._directory, self._finished = run, cache, directory, finished

    def measure_shifts(self, shifts: Sequence[InterleavedLayouts]) -> None:
        """Measure them and keep each when it is done."""
        prepare_run(self._run, self._cache)
        with RankForkServer(self._directory / "ranks", PRELOADED) as host:
            probe = None if all(shift.memory for shift in shifts) else probe_machine(host, self._run, self._cache)
            for number, shift in enumerate(shifts, start=1):
                rows = (
                    self._measure_peaks(host, shift)
                    if shift.memory or probe is None
                    else self._measure_shift(host, shift, probe)
                )
                self._finished.append_row(shift, rows)
                print_progress(f"parallel: {number} of {len(shifts)}: {shift.name}{', memory' * shift.memory} is done")

    def _measure_peaks(self, host: RankForkServer, shift: InterleavedLayouts) -> Row:
        """What each arm takes, by arm and layout; a peer that does not run has no figure."""
        configs = shift.parallel_configs()
        rows: dict[str, Row] = {}
        for arm, config in [*((ENGINE, config) for config in configs), *((peer, configs[0]) for peer in shift.peers)]:
            try:
                rows[_arm_key(arm, layout_name(config))] = memory_row(host, arm, self._run, config, self._cache)
            except TrainingError:
                if arm == ENGINE:
                    raise
        return {"memory": rows}

    def _measure_shift(self, host: RankForkServer, shift: InterleavedLayouts, probe: Probe) -> Row:
        load, is_first = load_average(), shift.name == SHIFTS[0].name
        specs = [
            TurnSpec(ALONE, ParallelConfig(), _TURN_STEPS if is_first else _ALONE_STEPS),
            *(TurnSpec(ENGINE, config, _TURN_STEPS) for config in shift.parallel_configs()),
            *(TurnSpec(peer, shift.parallel_configs()[0], _TURN_STEPS) for peer in shift.peers),
        ]
        done = take_turns(host, specs, self._run, self._cache, self._run.train.steps // _TURN_STEPS)
        alone, rest = done[0], done[1:]
        failed = [training for training in rest if training.spec.arm == ENGINE and training.reason is not None]
        if failed or alone.reason is not None:
            first = (failed or [alone])[0]
            raise TrainingError(f"bench: {layout_name(first.spec.config)}: {first.reason}")
        reference = alone.losses if is_first else self._reference_losses(alone.losses)
        peers = [training for training in rest if training.spec.arm != ENGINE]
        rows = [self._arm_row(training, alone, reference, shift, peers) for training in rest]
        rows += [_alone_row(alone, self._tokens_per_step)] if is_first else []
        cluster = cluster_of(probe, self._run, 2).model_dump(mode="json")
        return {"load": load, "rows": rows, "plan": list(self._plan_rows(rest, probe)), "cluster": cluster}

    @property
    def _tokens_per_step(self) -> int:
        return self._run.train.batch_size * self._run.data.sequence_length

    def _reference_losses(self, losses: Sequence[float]) -> list[float]:
        """The plain process's curve, all steps of it where its own shift is finished."""
        first_shift = self._finished.find_row(SHIFTS[0])
        return (
            list(losses)
            if first_shift is None
            else next(row["losses"] for row in first_shift["rows"] if row["arm"] == ALONE)
        )

    def _arm_row(
        self,
        one: LayoutTurns,
        alone: LayoutTurns,
        reference: Sequence[float],
        shift: InterleavedLayouts,
        peers: Sequence[LayoutTurns],
    ) -> Row:
        """One arm; for the engine's, with the fastest of its peers beside it."""
        is_engine = one.spec.arm == ENGINE
        beaten = [peer for peer in peers if peer.reason is None] if is_engine else []
        best = min(beaten, key=LayoutTurns.step_s, default=None)
        ran = one.reason is None
        return {
            "arm": one.spec.arm,
            "layout": layout_name(one.spec.config),
            "ranks": one.spec.config.num_ranks,
            "max_rel_loss_diff": _max_difference(one.losses, reference) if ran else None,
            "lossy": shift.lossy and is_engine,
            "sent_bytes_per_step": one.sent_bytes_per_step() if ran else None,
            "tokens_per_s": self._tokens_per_step / one.step_s() if ran else None,
            "over_alone": one.faster_than(alone) if ran else None,
            "peer": None if best is None else best.spec.arm,
            "peer_tokens_per_s": None if best is None else self._tokens_per_step / best.step_s(),
            "over_peer": None if best is None else one.faster_than(best),
            "cpu_s": one.cpu_s() if ran else None,
            "peer_cpu_s": None if best is None else best.cpu_s(),
            "reason": one.reason if not is_engine else shift.no_peer,
            "peak_memory_bytes": None,
            "planned_memory_bytes": None,
        }

    def _plan_rows(self, done: Sequence[LayoutTurns], probe: Probe) -> Iterator[Row]:
        for training in done:
            config = training.spec.config
            if training.spec.arm == ENGINE and training.reason is None:
                planned = plan_layout(self._run, config, cluster_of(probe, self._run, config.num_ranks))
                figures = compare_with_plan(
                    planned, training.step_s(), training.cpu_s(), training.waiting_share(), config.num_ranks
                )
                yield {"layout": layout_name(config), "ranks": config.num_ranks, **figures}


def _alone_row(alone: LayoutTurns, tokens: int) -> Row:
    return {
        "arm": ALONE,
        "layout": layout_name(alone.spec.config),
        "ranks": 1,
        "tokens_per_s": tokens / alone.step_s(),
        "peak_memory_bytes": None,
        "planned_memory_bytes": None,
        "losses": alone.losses,
    }


def _arm_key(arm: str, layout: str) -> str:
    return f"{arm}: {layout}"


def _max_difference(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest relative one over the steps that both have made."""
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=False))
