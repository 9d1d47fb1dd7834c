"""How long does it take from a verifier's nonce to a released key, with a real TPM implementation?

``python benchmarks/tpm_path.py OUT.json [--rounds 200]``

swtpm over its Unix socket, everything else in this process: nonce, fresh TLS key, quote over three PCRs, certificate,
TLS 1.3 handshake in memory, appraisal, token, its check, key release over the connection. Also the parts by themselves.
Milliseconds of wall time; the CPU time of this process is given beside it, which leaves out what swtpm used.
"""

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
from phalanx.security.tee import Binding, TpmAttester, TpmCounter, TpmDevice, TpmSealer

# the tests know how a software TPM is started
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "security" / "tee"))
from bare_tpm import BareTpm
from key_path import KEY, ROLE, RUN, Company, policy_for, whole_path

PCRS = (0, 7, 16)


def main() -> None:
    """Measure, and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    load = load_average()
    with tempfile.TemporaryDirectory() as folder:
        tpm = BareTpm(Path(folder))
        try:
            with tpm.open() as device:
                rows = measured(device, arguments.rounds)
        finally:
            tpm.close()
    figures = {
        "name": "tpm-path",
        "command": f"python benchmarks/tpm_path.py OUT --rounds {arguments.rounds}",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measured(device: TpmDevice, rounds: int) -> list[dict[str, Any]]:
    """Time the path and its parts, which take turns."""
    with TpmAttester(device, PCRS) as attester:
        company = Company(policy_for(attester, binding()))
        sealer, counter = TpmSealer(device, PCRS), TpmCounter.create(device)
        sealed = sealer.seal(KEY)
        acts: dict[str, Callable[[], Any]] = {
            "whole path": lambda: whole_path(company, attester),
            "quote": lambda: attester.evidence(binding()),
            "unseal": lambda: sealer.unseal(sealed),
            "counter": counter.increment,
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in acts}
        for _ in range(rounds):
            for name, act in acts.items():
                times[name].append(milliseconds(act))
    return [row(name, found) for name, found in times.items()]


def binding() -> Binding:
    """A fresh binding."""
    return Binding(secrets.token_bytes(32), b"\x0b" * 32, RUN, ROLE)


def milliseconds(act: Callable[[], Any]) -> tuple[float, float]:
    """Wall time and CPU time of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return (time.perf_counter() - wall) * 1000, (time.process_time() - cpu) * 1000


def row(name: str, times: list[tuple[float, float]]) -> dict[str, Any]:
    """Figures of one act."""
    ordered = sorted(wall for wall, _ in times)
    return {
        "act": name,
        "lowest_ms": ordered[0],
        "median_ms": statistics.median(ordered),
        "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "median_cpu_ms": statistics.median(cpu for _, cpu in times),
    }


if __name__ == "__main__":
    main()
