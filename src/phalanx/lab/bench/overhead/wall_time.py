"""``phalanx bench wall-time``: wall time where every party has a machine of its own, by stages, microbatches and line.

Ten processes on two cores cannot show it. Stages are timed alone, by CPU time, and a pipeline on paper is played
through with these durations (`planner.cost.guarded_step`). A real run of three stages, where the owner and one worker
have a core each, checks it: its CPU time outside of the timed work is charged to the two ends of its messages.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory, time_turns
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.lab.bench.measure.workloads import prepare_run, scratch_run
from phalanx.lab.bench.overhead.arm import ArmProcess, ArmSpec
from phalanx.lab.bench.overhead.rows import Row
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.tolerance.screen import draw_tensors
from phalanx.planner.cost.guarded_step import GuardedPipeline, Line, StageDurations
from phalanx.train import PipelineRun
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary

_GUARDS: Mapping[str, GuardConfig] = {
    "unguarded": GuardConfig(mode="off"),
    "standard": GuardConfig(preset="standard", step_audit_rate=0.0, owner_audit_rate=0.0),
}
_LOOPBACK = Line(bytes_per_s=1e9, latency_s=2e-4)
_LINES: Mapping[str, Line] = {
    "10 Gbit/s, 0.2 ms": Line(1.25e9, 2e-4),
    "1 Gbit/s, 1 ms": Line(1.25e8, 1e-3),
    "100 Mbit/s, 20 ms": Line(1.25e7, 2e-2),
}
_CHECKED_STAGES, _CHECKED_MICROBATCHES = 3, 8


@dataclass(frozen=True)
class _Sizes:
    """Sequences of a microbatch; timed turns of each stage; turns and steps of the real run; stages on paper."""

    sequences: int
    rounds: int
    turns: int
    steps: int
    stages: tuple[int, ...]
    microbatches: tuple[int, ...] = (8, 32)


def bench_wall_time(quick: bool) -> dict[str, Any]:
    """Time stages alone, check two parties against a real run, and play larger pipelines through.

    Returns:
        `checks`, measured and simulated seconds of a step of the real run; `rows`, one of each simulated pipeline.
    """
    load = load_average()
    sizes = _Sizes(2, 3, 1, 2, (4,), (8,)) if quick else _Sizes(8, 9, 4, 4, (3, 4, 6, 8))
    durations = {count: time_stages(_run_of(count, 8, sizes.sequences), sizes.rounds) for count in sizes.stages}
    checked = durations.get(_CHECKED_STAGES) or time_stages(_run_of(_CHECKED_STAGES, 8, sizes.sequences), sizes.rounds)
    message_s, checks = _check_run(sizes, checked)
    rows = [
        _row_of(_paper(sizes, stages, microbatches, replace(line, message_s=message_s), guard), sizes, name)
        for stages in durations.values()
        for microbatches in sizes.microbatches
        for name, line in _LINES.items()
        for guard in _GUARDS
    ]
    timed = {str(count): [asdict(stage) for stage in stages] for count, stages in durations.items()}
    return {**bench_head("wall-time", load, quick=quick), "checks": checks, "durations": timed, "rows": rows}


def _run_of(stages: int, microbatches: int, sequences: int) -> PipelineRun:
    run = scratch_run()
    train = run.train.model_copy(update={"batch_size": sequences * microbatches, "microbatches": microbatches})
    pipeline = run.pipeline.model_copy(update={"stages": stages})
    return run.model_copy(update={"train": train, "pipeline": pipeline, "guard": _GUARDS["standard"]})


def time_stages(run: PipelineRun, rounds: int) -> list[StageDurations]:
    """Time every stage of a run alone, one after the other: CPU seconds on one thread, medians of some turns."""
    torch.set_num_threads(1)
    source, _ = prepare_run(run, cache_directory())
    library = StageLibrary(source, make_plan(run, source), None)
    return [time_stage(library(stage), source.vocab_size, rounds) for stage in range(run.pipeline.stages)]


def time_stage(copy: StageCopy, vocabulary: int, rounds: int) -> StageDurations:
    """Time one stage; its weights change."""
    runner, shape = copy.runner, copy.plan.hidden_shape
    ids = torch.randint(0, vocabulary, shape[:2])
    x = ids if copy.spec.is_first else torch.randn(shape)
    gradient = None if copy.spec.is_last else torch.randn(shape)
    parameters = copy.module.trainable_parameters()
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    gradients = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}

    def run_forward() -> None:
        runner.forward(0, 0, x)
        if copy.spec.is_last:
            runner.compute_loss(0, ids, ids.numel())

    ways: dict[str, Callable[[], object]] = {
        "forward": run_forward,
        "backward": lambda: runner.backward(0, 0, gradient),
        "update": lambda: copy.apply_update(copy.step_count, gradients, 1.0),
        "digest": copy.compute_digest,
    }
    if gradient is not None and not copy.spec.is_first:

        def audit() -> None:
            runner.abandon_step()
            runner.redo_microbatch(0, 0, x, gradient, draw_tensors(sizes))

        ways["audit"] = audit
    times = time_turns(ways, rounds, warm_ups=2)
    cpu = {name: median(sample.cpu_s for sample in samples) for name, samples in times.items()}
    return StageDurations(**cpu, gradient_bytes=4.0 * sum(sizes.values()))


def _check_run(sizes: _Sizes, stages: list[StageDurations]) -> tuple[float, list[Row]]:
    """Run two parties, a core each; returns the seconds of a message at each end, and rows that compare."""
    checks, message_s = list[Row](), 0.0
    messages = 2 * (len(stages) - 1) * _CHECKED_MICROBATCHES
    for name, guard in _GUARDS.items():
        run = _run_of(len(stages), _CHECKED_MICROBATCHES, sizes.sequences).model_copy(update={"guard": guard})
        with scratch_directory() as directory:
            spec = ArmSpec(
                arm=name, plain=False, run=run, directory=str(directory / name), cache=str(cache_directory().resolve())
            )
            with ArmProcess(spec, {"OMP_NUM_THREADS": "1"}) as arm:
                arm.run_steps(2)
                blocks = [arm.run_steps(sizes.steps) for _ in range(sizes.turns)]
        wall_s = median(block.wall_s / sizes.steps for block in blocks)
        cpu_s = median(block.cpu_s / sizes.steps for block in blocks)
        if name == "unguarded":
            work = _CHECKED_MICROBATCHES * sum(stage.forward + stage.backward for stage in stages)
            message_s = max(0.0, cpu_s - work - sum(stage.update for stage in stages)) / (2 * messages)
        line = replace(_LOOPBACK, message_s=message_s)
        simulated = _paper(sizes, stages, _CHECKED_MICROBATCHES, line, name).step_seconds()
        checks.append(
            {"guard": name, "wall_s": wall_s, "cpu_s": cpu_s, "simulated_s": simulated, "ratio": simulated / wall_s}
        )
        print_progress(f"{name}: a step took {wall_s:.3f} s, {simulated:.3f} s on paper")
    return message_s, checks


def _paper(sizes: _Sizes, stages: list[StageDurations], microbatches: int, line: Line, guard: str) -> GuardedPipeline:
    run = _run_of(len(stages), microbatches, sizes.sequences)
    width = int(str(run.model.architecture["n_embd"])) if run.model.architecture else 0
    return GuardedPipeline(
        stages,
        microbatches,
        boundary_bytes=4.0 * sizes.sequences * run.data.sequence_length * width,
        line=line,
        is_guarded=guard != "unguarded",
        audits=max(1, round(_GUARDS["standard"].audit_rate * microbatches)),
    )


def _row_of(paper: GuardedPipeline, sizes: _Sizes, line: str) -> Row:
    step_s = paper.step_seconds()
    return {
        "stages": len(paper.stages),
        "microbatches": paper.microbatches,
        "line": line,
        "guarded": paper.is_guarded,
        "step_s": step_s,
        "tokens_per_s": paper.microbatches * sizes.sequences * scratch_run().data.sequence_length / step_s,
    }
