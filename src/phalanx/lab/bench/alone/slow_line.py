"""A bench of shadow upkeeps on a slow line, which all parties share: which costs least? The arms take turns.

``python -m phalanx.lab.bench.alone.slow_line OUT.json [--mbit 100] [--turns 3] [--note TEXT]``

The program starts itself again in a network namespace of its own, with a token bucket that holds its loopback to
`--mbit` in all: owner and workers behave as on one site's line. It needs Linux, root and ``tc``. Every arm runs the
same stages and microbatches as in ``phalanx bench overhead``. The slow line shows in the wall seconds of a step; they
are compared within a turn.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.errors import ConfigError
from phalanx.lab.bench.measure.machine import load_average, taken_on
from phalanx.lab.bench.overhead.overhead import run_in_turns
from phalanx.lab.bench.overhead.overhead_arms import (
    EIGHTH,
    LOCKSTEP,
    UNGUARDED,
    InterleavedGuards,
    shift_of,
)
from phalanx.lab.bench.overhead.rows import ArmMeasurement

_INSIDE = "PHALANX_SLOW_LINE"
_BURST_BYTES = 256 * 1024


def main(arguments: Sequence[str]) -> int:
    """Measure on a slow line and write OUT.

    Raises:
        ConfigError: The system lacks a requirement of the slow line.
        TrainingError: An arm failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mbit", type=int, default=100, help="of the line, both directions and all parties together")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--note", default="")
    asked = parser.parse_args(arguments)
    if _INSIDE not in os.environ:
        return _start_inside(arguments)
    _slow_down(asked.mbit)
    result = measure(_arms(asked.turns), asked.mbit, asked.note)
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(shift: InterleavedGuards, mbit: int, note: str) -> dict[str, Any]:
    """Let all arms take turns; see the module."""
    load = load_average()
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        arms = run_in_turns(shift, Path(directory))
    return {
        "name": "slow-line",
        "command": "python -m phalanx.lab.bench.alone.slow_line",
        **taken_on(load),
        "note": note,
        "rows": [_row(shift, name, arm, arms[UNGUARDED], mbit) for name, arm in arms.items()],
    }


def _row(shift: InterleavedGuards, name: str, arm: ArmMeasurement, base: ArmMeasurement, mbit: int) -> dict[str, Any]:
    guard = shift.arms[name]
    ratios = [ours / theirs for ours, theirs in zip(arm.wall_s, base.wall_s, strict=True)]
    moved = sum(sum(block.report.bytes_by_link.values()) for block in arm.blocks) / arm.steps
    return {
        "shadow": guard.shadow if guard.enabled else None,
        "q": guard.audit_rate if guard.enabled else None,
        "mbit": mbit,
        "model": shift.model,
        "K": shift.run.pipeline.stages,
        "M": shift.run.train.microbatches,
        "steps": arm.steps,
        "bytes_per_step": moved,
        "wall_s_per_step": median(arm.wall_s),
        "cpu_s_per_step": median(arm.cpu_s),
        "wall_over_unguarded": median(ratios),
        "wall_over_unguarded_of_each_turn": ratios,
    }


def _arms(turns: int) -> InterleavedGuards:
    shift = shift_of(4, 32, 16, (EIGHTH, LOCKSTEP), rounds=turns, budget_s=float("inf"))
    return replace(shift, steps=8, warm_ups=1)


def _start_inside(arguments: Sequence[str]) -> int:
    tools = ("unshare", "ip", "tc")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise ConfigError(
            f"slow_line: needs root and {', '.join(tools)} for a network of its own; "
            f"missing: {', '.join(missing) or 'root'}"
        )
    command = ["unshare", "--net", sys.executable, "-m", "phalanx.lab.bench.alone.slow_line", *arguments]
    return subprocess.run(command, check=False, env={**os.environ, _INSIDE: "1"}).returncode  # noqa: S603


def _slow_down(mbit: int) -> None:
    bucket = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst {_BURST_BYTES} latency 400ms"
    for command in ("ip link set lo up", bucket):
        subprocess.run(command.split(), check=True)  # noqa: S603


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
