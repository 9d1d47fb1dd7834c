"""How long does the appraisal of one piece of evidence take, without a network?

``python benchmarks/appraisal.py OUT.json [--rounds 200]``

The published evidence of `tests/vectors`, from the envelope's bytes to the result. Kinds take turns. `warm`: as in a
run that appraises again and again, checked certificates remembered; `cold`: nothing remembered, as for the first
evidence of a vendor. Milliseconds, in one thread: of wall time, and of CPU time, which a busy machine leaves alone.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
from phalanx.security.tee import appraise, parse_evidence
from phalanx.security.tee.formats import signature, x509

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure, and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    cases = published()
    load = load_average()
    times: dict[tuple[str, str], list[tuple[float, float]]] = {
        (kind, arm): [] for kind in cases for arm in ("cold", "warm")
    }
    for _ in range(arguments.rounds):
        for kind, act in cases.items():
            forget()
            times[kind, "cold"].append(milliseconds(act))
            times[kind, "warm"].append(milliseconds(act))
    figures = {
        "name": "appraisal",
        "command": f"python benchmarks/appraisal.py OUT --rounds {arguments.rounds}",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load,
        "rounds": arguments.rounds,
        "rows": [row(kind, arm, found) for (kind, arm), found in times.items()],
    }
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def published() -> dict[str, Callable[[], Any]]:
    """What is timed, by kind."""
    # the tests know where the samples are and which policy each must pass
    sys.path.insert(0, str(ROOT / "tests" / "security" / "tee"))
    from published import PUBLISHED  # noqa: PLC0415

    cases = {}
    for kind, make in PUBLISHED.items():
        case = make()
        envelope = case.evidence.to_bytes()
        cases[kind] = lambda case=case, envelope=envelope: appraise(
            parse_evidence(envelope), case.policy, case.expected, case.now
        )
    return cases


def forget() -> None:
    """Drop every remembered certificate, key and signature."""
    for cached in (x509.parse_certificate, x509.parse_crl, signature.load_key, signature.check_x509_signature):
        cached.cache_clear()


def milliseconds(act: Callable[[], Any]) -> tuple[float, float]:
    """Wall time and CPU time of one call."""
    wall, cpu = time.perf_counter(), time.thread_time()
    act()
    return (time.perf_counter() - wall) * 1000, (time.thread_time() - cpu) * 1000


def row(kind: str, arm: str, times: list[tuple[float, float]]) -> dict[str, Any]:
    """Figures of one kind in one state."""
    ordered = sorted(wall for wall, _ in times)
    return {
        "kind": kind,
        "arm": arm,
        "lowest_ms": ordered[0],
        "median_ms": statistics.median(ordered),
        "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "median_cpu_ms": statistics.median(cpu for _, cpu in times),
    }


if __name__ == "__main__":
    main()
