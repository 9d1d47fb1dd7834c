"""A bench of exact numerics in fleets: three workers of three numeric classes, honest and attacked, as processes.

``python -m phalanx.lab.bench.alone.exact_fleet OUT.json [--steps 500] [--attacked-steps 24] [--attacks KIND ...]``

The guard is `standard`, the law `exact`. Honest: so many steps of the mixed fleet, and of an unguarded fleet of one
class. Attacked: worker-2, of AVX2, lies as one line of the table of attacks says; its run is compared, bit for bit,
with the unguarded fleet of one class. Classes are instruction sets of one machine, chosen by the environment; where it
has no AVX-512, products of any processor (`MKL_CBWR=COMPATIBLE`) are the third.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from phalanx.config import digest_config
from phalanx.lab.attacks import ATTACKS, attackers_of
from phalanx.lab.bench.alone.exact_numerics import KERNELS
from phalanx.lab.bench.detection.cell import DetectionCell, small_run
from phalanx.lab.bench.detection.detection_processes import ProcessCompanies, process_run_of
from phalanx.lab.bench.detection.drills import train_quietly
from phalanx.lab.bench.measure.harness import print_progress, run_program, scratch_directory
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.train import PipelineRun, StagedRun, train

_HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
CLASSES = {
    "worker-1": "AVX-512" if _HAS_AVX512 else "MKL_CBWR=COMPATIBLE",
    "worker-2": "AVX2",
    "worker-3": "no vectors",
}
"""Kernels of each worker; the owner's are the machine's."""


def train_mixed(run: StagedRun, directory: Path) -> dict[str, Any]:
    """Train with a worker of each class, or, without a guard, with workers of the owner's class."""
    if run.guard.mode == "off":
        return train_quietly(run, directory)
    launchers = {name: (__spec__.name, "--kernels", kernels) for name, kernels in CLASSES.items()}
    opener = attackers_of(run.attack, home=run.home, launchers=launchers)
    return train(run, directory, console=Console(stderr=True), open_workers=opener)


def exact_cell(attack: AttackConfig, steps: int) -> DetectionCell:
    """A company of five stages with exact numerics and the guard `standard`, as `bench detection` describes one."""
    run = small_run(5, "standard", attack=attack)
    smaller = {"numerics": "exact", "batch_size": 8, "microbatches": 4}
    written = {**run.written, "train": run.train.model_copy(update=smaller)}
    return DetectionCell(PipelineRun(**written), "standard", steps)


def measure_honest(steps: int, directory: Path) -> dict[str, Any]:
    """Train the mixed fleet and the fleet of one class for so many steps."""
    run = process_run_of(exact_cell(AttackConfig(), steps))
    run = run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})
    started = time.perf_counter()
    mixed = train_mixed(run, directory / "mixed")
    unguarded = run.model_copy(update={"guard": GuardConfig(mode="off")})
    alone = train_quietly(unguarded, directory / "alone")
    keys = ("status", "audits", "verdicts", "evicted", "lost", "loss_last", "final_weights_digest", "guarantees")
    return {
        "run": digest_config(run),
        "steps": steps,
        **{key: mixed[key] for key in keys},
        "digest_of_one_class": alone["final_weights_digest"],
        "bit_identical": mixed["final_weights_digest"] == alone["final_weights_digest"],
        "wall_s": time.perf_counter() - started,
    }


def measure_fleet(steps: int = 500, attacked_steps: int = 24, attacks: list[str] | None = None) -> dict[str, Any]:
    """Measure the honest fleet, unless `steps` is 0, and each of the attacks in its turn.

    Args:
        attacks: Of the table, which is the default; `none` is none of it.
    """
    with scratch_directory() as directory:
        honest = measure_honest(steps, directory) if steps else None
        print_progress(f"honest: {honest}")
        companies, rows = ProcessCompanies(directory, train_mixed), []
        for kind in ATTACKS if attacks is None else {*attacks} - {"none"}:
            cell = exact_cell(AttackConfig(kind=kind, stages=(2,), rate=1.0, from_step=2), attacked_steps)
            rows.append(companies.train_cell(cell))
            print_progress(f"{kind}: blamed {rows[-1]['blamed']}, lost {rows[-1]['lost']}, held {rows[-1]['held']}")
    return {"classes": {"owner": "the machine's", **CLASSES}, "honest": honest, "attacked": rows}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--kernels"]:
        os.environ.update(KERNELS[sys.argv[2]])
        os.execv(sys.executable, [sys.executable, "-m", *sys.argv[3:]])  # noqa: S606 - the worker's own command
    run_program("exact-fleet", measure_fleet)
