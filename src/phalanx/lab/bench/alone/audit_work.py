"""A bench of audits: the cost of an audited microbatch, without and with its weight gradient; CPU time of one stage.

``python -m phalanx.lab.bench.alone.audit_work OUT.json [--rounds 12]``

The stage is a middle one of `scratch-10m` (blocks of width 288, 4 sequences of 128 tokens a microbatch, M = 8).
All work on a microbatch is forward and backward with weight gradients, as the stage does it; an audit is forward and
the gradient of the input; a screened one has the weight gradient of drawn tensors besides, and compares the claimed sum
with it.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from phalanx.lab.bench.measure.harness import run_program, time_turns
from phalanx.lab.bench.measure.workloads import scratch_run
from phalanx.models import open_model
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.tolerance.screen import doubt_about, draw_tensors
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary

STAGE = 1


def measure_audit_work(rounds: int = 12) -> dict[str, Any]:
    """Measure one row: the ways in turns."""
    torch.set_num_threads(1)
    run = scratch_run()
    with TemporaryDirectory() as directory:
        source = open_model(run.model, Path(directory), run.train.seed)
        plan = make_plan(run, source)
        copy: StageCopy = StageLibrary(source, plan, None)(STAGE)
    runner, count = copy.runner, run.train.microbatches
    shape = (run.train.batch_size // count, run.data.sequence_length, 288)
    x, gradient = torch.randn(shape), torch.randn(shape)
    sizes = {name: parameter.numel() for name, parameter in copy.module.trainable_parameters().items()}
    claimed = {name: count * g for name, g in runner.redo_microbatch(0, 0, x, gradient)[2].items()}

    def screened() -> None:
        _, _, recomputed = runner.redo_microbatch(0, 0, x, gradient, draw_tensors(sizes))
        doubt_about(claimed, recomputed, count)

    def do_all_work() -> None:
        runner.forward(0, 0, x)
        runner.backward(0, 0, gradient)

    def begin_turn(name: str) -> None:
        if name == "all_work":
            runner.abandon_step()

    ways: dict[str, Callable[[], object]] = {
        "all_work": do_all_work,
        "audit": lambda: runner.recompute_microbatch(0, 0, x, gradient),
        "screened_audit": screened,
        "screen": lambda: doubt_about(claimed, {name: claimed[name] for name in draw_tensors(sizes)}, count),
    }
    times = time_turns(ways, rounds, warm_ups=2, before=begin_turn)
    cpu = {name: median(sample.cpu_s for sample in samples) for name, samples in times.items()}
    row = {
        "numbers": sum(sizes.values()),
        "rounds": rounds,
        "cpu_s": cpu,
        "audited_share": cpu["audit"] / cpu["all_work"],
        "screened_share": cpu["screened_audit"] / cpu["all_work"],
    }
    return {"rows": [row]}


if __name__ == "__main__":
    run_program("audit-work", measure_audit_work)
