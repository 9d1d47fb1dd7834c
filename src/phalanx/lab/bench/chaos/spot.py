"""``phalanx bench spot``: goodput on machines that are taken and come back, by the rates of published traces."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from phalanx.checkpoint import CheckpointConfig
from phalanx.lab.bench.chaos.chaos import small_workload
from phalanx.lab.bench.chaos.goodput import Arm, Window, play_window
from phalanx.lab.bench.chaos.spot_play import SPOT_ARMS, SpotArm, SpotPlay, SpotWork
from phalanx.lab.bench.chaos.spot_traces import HOUR_S, SPOT_SHAPES, draw_trace
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.lab.bench.measure.row_file import Row
from phalanx.lab.bench.measure.workloads import prepare_run

_STAGES = (8, 12)
_RESTARTS_S = (60.0, 300.0)
_WINDOW = Window(mean_s=40.0, failures=4, warm_up_s=20.0, undisturbed_s=40.0, group=2)
_PROCESS_ARMS: Mapping[str, tuple[Arm, int]] = {
    "two shadows": ("phalanx", 2),
    "one shadow": ("phalanx", 1),
    "checkpoint restart": ("torchrun", 1),
}


def bench_spot(quick: bool) -> dict[str, Any]:
    """Play drawn traces through for each arm.

    Args:
        quick: One seed and three hours in the place of five and 24.

    Returns:
        `rows`, one for each number of stages, shape, arm and time that a restart takes; seconds are simulated.
    """
    load, work = load_average(), SpotWork()
    seeds, hours = (1, 3.0) if quick else (5, 24.0)
    rows = [
        _row_of(stages, shape, arm, seeds, hours, restart_s)
        for stages in _STAGES
        for shape in SPOT_SHAPES
        for arm in SPOT_ARMS
        # with a guard no process begins anew
        for restart_s in (_RESTARTS_S if SPOT_ARMS[arm].shadows == 0 else _RESTARTS_S[:1])
    ]
    shapes = {name: asdict(shape) for name, shape in SPOT_SHAPES.items()}
    return {**bench_head("spot", load, quick=quick), "assumed": asdict(work), "shapes": shapes, "rows": rows}


def bench_spot_processes(quick: bool) -> dict[str, Any]:
    """Let an owner and five workers train while two workers at a time are killed, and replaced at once.

    Args:
        quick: One time at which two are killed in the place of four.
    """
    load, usual, cache = load_average(), small_workload(quick=True).run, cache_directory()
    window = replace(_WINDOW, failures=1) if quick else _WINDOW
    pipeline = usual.pipeline.model_copy(update={"stages": 7})
    checkpoint = CheckpointConfig(every=8, keep=2, asynchronous=True)
    run = usual.model_copy(update={"pipeline": pipeline, "checkpoint": checkpoint})
    run = run.model_copy(update={"train": run.train.model_copy(update={"steps": 1_000_000})})
    prepare_run(run, cache)
    rows = []
    for name, (arm, shadows) in _PROCESS_ARMS.items():
        guarded = run.model_copy(update={"guard": run.guard.model_copy(update={"shadows": shadows})})
        with scratch_directory() as directory:
            rows.append({**play_window(guarded, arm, window, directory, cache), "arm": name})
        print_progress(f"spot: six processes, {name}: {rows[-1]['steps']} steps in {rows[-1]['window_s']:.0f} s")
    return {**bench_head("spot-processes", load, quick=quick), "rows": rows}


def _row_of(stages: int, shape_name: str, arm: str, seeds: int, hours: float, restart_s: float) -> Row:
    """Play one arm through the traces of all seeds; a machine of the pool for each stage between the owner's."""
    work, shape, pool = SpotWork(restart_s=restart_s), SPOT_SHAPES[shape_name], stages - 2
    workers = [f"worker-{number}" for number in range(1, pool + 1)]
    plays = []
    for seed in range(1, seeds + 1):
        play = SpotPlay(work, SPOT_ARMS[arm], shape, list(workers))
        play.play_trace(draw_trace(shape, pool, hours, seed), hours * HOUR_S)
        plays.append(play)
    rates = [work.sequences * play.steps / (hours * HOUR_S) for play in plays]
    # nobody is taken: with this arm's guard, and where nothing is checked
    quiet = [SpotPlay(work, each, shape, list(workers)) for each in (SPOT_ARMS[arm], SpotArm(0, cuts=False))]
    own_rate, free_rate = (work.sequences / play.step_seconds(play.roles) for play in quiet)
    row: Row = {
        "stages": stages,
        "shape": shape_name,
        "arm": arm,
        "restart_s": restart_s if SPOT_ARMS[arm].shadows == 0 else None,
        "traces": seeds,
        "hours": hours,
        "sequences_per_s": statistics.mean(rates),
        "sequences_per_s_lowest": min(rates),
        "sequences_per_s_highest": max(rates),
        "share_of_undisturbed": statistics.mean(rates) / free_rate,
        "share_of_own_undisturbed": statistics.mean(rates) / own_rate,
        "steps_lost": sum(play.lost_steps for play in plays),
        "takeovers": sum(play.num_takeovers for play in plays),
        "returns_to_a_checkpoint": sum(play.num_fallbacks for play in plays),
        "cuts": sum(play.num_cuts for play in plays),
    }
    print_progress(f"spot: K = {stages}, {shape_name}, {arm}: {100 * row['share_of_undisturbed']:.0f} %")
    return row
