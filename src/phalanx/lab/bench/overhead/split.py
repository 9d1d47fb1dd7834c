"""``phalanx bench split``: one run in every mode, as processes, in turns: time, bytes, cost of security, weights."""

import io
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.lab.bench.overhead.split_runs import SplitArm, arms_of, make_split_run
from phalanx.telemetry import read_metrics
from phalanx.train import train

_WARM_UP = 2
"""First steps of a run, which are not timed."""
_PARTS = ("cipher_s", "digest_s", "framing_s", "signing_s", "meeting_s")

Row = dict[str, Any]


def bench_split(quick: bool) -> dict[str, Any]:
    """Measure plaintext, sealed and masked, each size beside its own plaintext; progress goes to standard error.

    Args:
        quick: End within 10 minutes on 2 cores.

    Returns:
        name, machine, commit, load and rows. All costs are CPU seconds of both processes, clients and enclave, in a
        median step; masked workers are not in them.

        - `cipher_s` AES-GCM alone; `digest_s` digests of frames; `framing_s` buffers, headers and the chain of the
          transcript; `signing_s` the transport's signatures; `meeting_s` looking whether the enclave is still accepted.
        - `crypto_share`: the cipher's part of a *plaintext* step of this size. `security_share`: that of all of them.
          A plaintext run has the transport's digests and signatures, so its own share is not 0. TLS, which computes
          in threads of its own, is in no part, and in plaintext and sealed alike.
        - `meetings_s`: evidence, appraisal, tokens and keys of the whole run, once.

    Raises:
        PhalanxError: A run failed.
    """
    return measure_split(arms_of(quick), steps=10 if quick else 24, turns=2 if quick else 5, quick=quick)


def measure_split(arms: Sequence[SplitArm], *, steps: int, turns: int, quick: bool) -> dict[str, Any]:
    """Measure so many turns of each arm; see `bench_split`."""
    load = load_average()
    os.environ["PHALANX_CACHE"] = str(cache_directory().resolve())
    results_of_arm: dict[SplitArm, list[Mapping[str, Any]]] = {arm: [] for arm in arms}
    with scratch_directory() as directory:
        for turn in range(turns):
            for number, (arm, results) in enumerate(results_of_arm.items()):
                results.append(_run_once(arm, steps, directory / f"{number}-{turn}"))
                print_progress(f"{arm.arm_label}, turn {turn + 1} of {turns}: {results[-1]['step_s']:.3f} s a step")
    return {
        **bench_head("split", load, quick=quick),
        "steps": steps,
        "turns": turns,
        "rows": split_rows(results_of_arm),
    }


def split_rows(found: Mapping[SplitArm, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Return one row for each arm.

    Args:
        found: Results of each run of an arm: step_s, bytes_per_step, costs, meetings_s, final_weights_digest.
    """
    plain = {arm.size: _median_of(results, "cpu_s") for arm, results in found.items() if arm.mode == "plaintext"}
    return [_split_row(arm, results, plain.get(arm.size)) for arm, results in found.items()]


def _run_once(arm: SplitArm, steps: int, directory: Path) -> Mapping[str, Any]:
    summary = train(make_split_run(arm, steps), directory, console=Console(file=io.StringIO()))
    lines = read_metrics(directory / "metrics.jsonl")
    return {
        "step_s": statistics.median(row["wall_s"] for row in lines[_WARM_UP:]),
        "bytes_per_step": statistics.median(sum(row["bytes"].values()) for row in lines[_WARM_UP:]),
        **summary["split"]["costs_of_a_step"],
        "meetings_s": summary["split"]["meeting_s"],
        "final_weights_digest": summary["final_weights_digest"],
    }


def _split_row(arm: SplitArm, results: Sequence[Mapping[str, Any]], plain_cpu_s: float | None) -> Row:
    digests = {result["final_weights_digest"] for result in results}
    parts = {name: _median_of(results, name) for name in _PARTS}
    return {
        **arm.as_row(),
        "step_s": _median_of(results, "step_s"),
        "step_s_worst": max(result["step_s"] for result in results),
        "bytes_per_step": _median_of(results, "bytes_per_step"),
        "cpu_s": _median_of(results, "cpu_s"),
        **parts,
        "meetings_s": _median_of(results, "meetings_s"),
        # of a plaintext step, where one of this size was measured
        "crypto_share": None if plain_cpu_s is None else parts["cipher_s"] / plain_cpu_s,
        "security_share": None if plain_cpu_s is None else sum(parts.values()) / plain_cpu_s,
        # one and the same in every turn, or none
        "final_weights_digest": digests.pop() if len(digests) == 1 else None,
    }


def _median_of(results: Sequence[Mapping[str, Any]], name: str) -> float:
    value: float = statistics.median(result[name] for result in results)
    return value
