"""ZeRO 1 to 3 by DeepSpeed (section ``[deepspeed]``) beside the same by torch's means (``[parallel]``), and offloaded.

``python -m phalanx.lab.bench.parallel.deepspeed_zero OUT.json [--ranks 2] [--steps 8] [--width 384]``

Pairs train the same model on the same batches, a turn of two steps after the other; one plain process beside the first
pair says what the losses should be. Memory is measured afterwards by ranks of their own, one arm at a time, since
giving freed memory back at once costs time. A CPU's offloaded tensors lie in the memory that they came from, so that
only files can spare any.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, run_program, scratch_directory
from phalanx.lab.bench.measure.workloads import prepare_run
from phalanx.lab.bench.parallel.arms import ALONE, ENGINE
from phalanx.lab.bench.parallel.interleave import LayoutTurns, TurnSpec, take_turns
from phalanx.lab.bench.parallel.layouts import with_layout
from phalanx.lab.bench.parallel.memory import large_run, measure_peak
from phalanx.lab.bench.parallel.ranks import RankForkServer
from phalanx.models import ModelSource
from phalanx.parallel import ParallelConfig
from phalanx.parallel.deepspeed import DeepSpeedConfig
from phalanx.planner import shape_of
from phalanx.train import PipelineRun
from phalanx.train.engines.domain_deepspeed import check_deepspeed

_TURN_STEPS = 2
_UPDATED_AT_ONCE = 2_000_000
"""Numbers of a rank's share that are read from files at a time."""

Row = dict[str, Any]


@dataclass(frozen=True)
class ZeroPair:
    """A layout of the engine's own, and sections ``[deepspeed]`` that share out the same."""

    own: ParallelConfig
    sections: tuple[DeepSpeedConfig, ...]

    def turn_specs(self) -> list[TurnSpec]:
        """Return the arms, the own one first."""
        copies = ParallelConfig(dp=self.own.dp)
        joined = [TurnSpec(ENGINE, copies, _TURN_STEPS, section) for section in self.sections]
        return [TurnSpec(ENGINE, self.own, _TURN_STEPS), *joined]


def zero_pairs(ranks: int, directory: Path) -> list[ZeroPair]:
    """List what is measured.

    Args:
        directory: Existing directory on a disk, for what is kept in files.
    """
    own = ParallelConfig(dp=ranks, zero=3)
    files = DeepSpeedConfig(
        offload_optimizer="nvme",
        offload_parameters="nvme",
        directory=str(directory),
        update_at_once=_UPDATED_AT_ONCE,
    )
    memory = DeepSpeedConfig(offload_optimizer="cpu", offload_parameters="cpu")
    return [
        ZeroPair(own.model_copy(update={"zero": 1}), (DeepSpeedConfig(zero=1),)),
        ZeroPair(own.model_copy(update={"zero": 2}), (DeepSpeedConfig(zero=2),)),
        ZeroPair(own, (DeepSpeedConfig(zero=3),)),
        ZeroPair(own.model_copy(update={"offload": True}), (memory, files)),
    ]


def bench_zero(ranks: int = 2, steps: int = 8, width: int = 384) -> dict[str, Any]:
    """Measure all pairs; see `measure_pairs`.

    Args:
        width: Numbers a token has between blocks, a multiple of 8. DeepSpeed keeps shares below 1 MiB in memory, so of
            the blocks of a narrower model nothing would lie in files.
    """
    return measure_pairs(large_run(width), ranks, steps)


def measure_pairs(run: PipelineRun, ranks: int, steps: int) -> dict[str, Any]:
    """Measure all pairs in one run.

    Args:
        steps: A multiple of 2, at least 4.

    Returns:
        Parameters of the model, and a row each arm. `max_rel_loss_diff` is from one plain process, `over_own` the
        steps a second over those of the own layout in the same minutes, `peak_memory_bytes` of the neediest rank.
    """
    cache = cache_directory()
    run = run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})
    source, _ = prepare_run(run, cache)
    alone = TurnSpec(ALONE, ParallelConfig(), _TURN_STEPS)
    rows, reference = list[Row](), list[float]()
    with (
        tempfile.TemporaryDirectory(prefix="deepspeed-zero-", dir=cache) as disk,
        scratch_directory() as directory,
        RankForkServer(directory / "ranks") as host,
    ):
        pairs = zero_pairs(ranks, Path(disk).resolve())
        _build_kernels(run, pairs, source)
        for number, pair in enumerate(pairs, start=1):
            specs = [*pair.turn_specs(), *([] if reference else [alone])]
            done = take_turns(host, specs, run, cache, steps // _TURN_STEPS)
            _check_turns(done)
            reference = reference or done[-1].losses
            for training in done[: 1 + len(pair.sections)]:
                peak = measure_peak(host, replace(training.spec, steps=_TURN_STEPS), run, cache)
                rows.append(_arm_row(training, done[0], reference, peak))
            print_progress(f"deepspeed-zero: {number} of {len(pairs)} pairs are done")
    return {
        "parameters": shape_of(source.hub_config_dict).num_parameters,
        "microbatches": run.train.microbatches,
        "tokens_per_step": run.train.batch_size * run.data.sequence_length,
        "steps": steps,
        "rows": rows,
    }


def _build_kernels(run: PipelineRun, pairs: Sequence[ZeroPair], source: ModelSource) -> None:
    """Refuse what this machine cannot do, and compile kernels before anything is timed."""
    for pair in pairs:
        for spec in pair.turn_specs():
            check_deepspeed(with_layout(run, spec.config, spec.deepspeed), spec.config, source, None, build=True)


def _check_turns(done: Sequence[LayoutTurns]) -> None:
    for training in done:
        if training.reason is not None:
            raise TrainingError(f"bench: {training.spec.config.planned_layout}: {training.reason}")


def _arm_row(training: LayoutTurns, own: LayoutTurns, reference: Sequence[float], peak: int) -> Row:
    section, config = training.spec.deepspeed, training.spec.config
    in_memory = "cpu" if config.offload else "none"
    return {
        "section": "parallel" if section is None else "deepspeed",
        "zero": config.zero if section is None else section.zero,
        "offload_optimizer": in_memory if section is None else section.offload_optimizer,
        "offload_parameters": in_memory if section is None else section.offload_parameters,
        "max_rel_loss_diff": max(
            abs(mine - theirs) / abs(theirs) for mine, theirs in zip(training.losses, reference, strict=True)
        ),
        "step_s": training.step_s(),
        "cpu_s": training.cpu_s(),
        "over_own": None if section is None else training.faster_than(own),
        "sent_bytes_per_step": training.sent_bytes_per_step(),
        "peak_memory_bytes": peak,
    }


if __name__ == "__main__":
    run_program("deepspeed-zero", bench_zero)
