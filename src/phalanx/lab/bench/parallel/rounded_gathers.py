"""Copies that share parameters and exchange them exactly, gather them in int8, or sum gradients in int8 as well.

``python -m phalanx.lab.bench.parallel.rounded_gathers OUT.json [--ranks 2] [--steps 20]``

The three train the same model on the same batches, a turn of four steps after the other. The kernel counts the
bytes on the connections of all ranks, the sums of losses and norms among them.
"""

import statistics
from typing import Any

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import cache_directory, run_program, scratch_directory
from phalanx.lab.bench.measure.workloads import prepare_run
from phalanx.lab.bench.parallel.arms import ENGINE
from phalanx.lab.bench.parallel.interleave import LayoutTurns, TurnSpec, take_turns
from phalanx.lab.bench.parallel.layouts import small_run
from phalanx.lab.bench.parallel.ranks import RankForkServer
from phalanx.parallel import ParallelConfig
from phalanx.parallel.config import OF_SHARED_GRADIENTS, Compression
from phalanx.planner import shape_of

_EXACT: Compression = "none"
_TURN_STEPS = 4


def measure_exchanges(ranks: int = 2, steps: int = 20) -> dict[str, Any]:
    """Measure the three ways in one run.

    Args:
        steps: A multiple of 4, at least 8.

    Returns:
        Parameters of the model, and a row each way. `loss_last` is the mean over the last turn, `sent_bytes_per_step`
        of all ranks in it; times are medians of a step.
    """
    run, cache = small_run(), cache_directory()
    run = run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})
    exact = ParallelConfig(dp=ranks, zero=3)
    configs = [exact.model_copy(update={"gradient_compression": name}) for name in (_EXACT, *OF_SHARED_GRADIENTS)]
    source, _ = prepare_run(run, cache)
    with scratch_directory() as directory, RankForkServer(directory / "ranks") as host:
        specs = [TurnSpec(ENGINE, config, _TURN_STEPS) for config in configs]
        done = take_turns(host, specs, run, cache, steps // _TURN_STEPS)
    for training in done:
        if training.reason is not None:
            raise TrainingError(f"bench: {training.spec.config.gradient_compression}: {training.reason}")
    return {
        "parameters": shape_of(source.hub_config_dict).num_parameters,
        "microbatches": run.train.microbatches,
        "steps": steps,
        "rows": [_way_row(training, done[0]) for training in done],
    }


def _way_row(training: LayoutTurns, exact: LayoutTurns) -> dict[str, Any]:
    sent, sent_exactly = training.sent_bytes_per_step(), exact.sent_bytes_per_step()
    return {
        "gradient_compression": training.spec.config.gradient_compression,
        "sent_bytes_per_step": sent,
        "bytes_over_exact": None if sent is None or sent_exactly is None else sent / sent_exactly,
        "loss_last": statistics.fmean(training.losses[-_TURN_STEPS:]),
        "max_rel_loss_diff": max(
            abs(mine - theirs) / abs(theirs) for mine, theirs in zip(training.losses, exact.losses, strict=True)
        ),
        "step_s": training.step_s(),
        "cpu_s": training.cpu_s(),
    }


if __name__ == "__main__":
    run_program("rounded-gathers", measure_exchanges)
