"""How long does the appraisal of evidence take, and the way from a verifier's nonce to a released key?

``python -m phalanx.lab.bench.alone.attestation OUT.json --path {appraisal,tpm} [--rounds 200]``, in a checkout: samples
and the software TPM are those of the tests. Kinds and parts take turns; milliseconds of wall and CPU time, one thread.

`appraisal`: the published evidence of ``tests/vectors``, from the envelope's bytes to the result, without a network.
`warm`: checked certificates are remembered, as in a run that appraises again; `cold`: nothing is remembered.
`tpm`: swtpm over its Unix socket, everything else in this process: nonce, fresh TLS key, quote over three PCRs,
certificate, TLS 1.3 handshake in memory, appraisal, token, its check, key release; also the parts by themselves. The
CPU time leaves out what swtpm used.
"""

import argparse
import importlib
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.harness import program_parser, run_program
from phalanx.security.tee import (
    Binding,
    TpmAttester,
    TpmCounter,
    TpmDevice,
    TpmSealer,
    appraise_evidence,
    parse_evidence,
)
from phalanx.security.tee.formats import signature, x509

TESTS = Path("tests/security/tee")
PCRS = (0, 7, 16)
Times = list[tuple[float, float]]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one path."""
    sys.path.insert(0, str(TESTS.resolve()))
    if options.path == "appraisal":
        return {"name": "appraisal", "rounds": options.rounds, "rows": measure_appraisal(options.rounds)}
    with tempfile.TemporaryDirectory() as folder:
        tpm: Any = importlib.import_module("bare_tpm").BareTpm(Path(folder))
        try:
            with tpm.open() as device:
                rows = measure_tpm(device, options.rounds)
        finally:
            tpm.close()
    return {"name": "tpm-path", "rounds": options.rounds, "rows": rows}


def measure_appraisal(rounds: int) -> list[dict[str, Any]]:
    """Appraise every published kind, cold and warm."""
    times: dict[tuple[str, str], Times] = {}
    cases = {kind: make() for kind, make in importlib.import_module("published").PUBLISHED.items()}
    for _ in range(rounds):
        for kind, case in cases.items():
            envelope = case.evidence.to_bytes()

            def act(case: Any = case, envelope: bytes = envelope) -> object:
                return appraise_evidence(parse_evidence(envelope), case.policy, case.expected, case.now)

            for cached in (x509.parse_certificate, x509.parse_crl, signature.load_key, signature.check_x509_signature):
                cached.cache_clear()
            for arm in ("cold", "warm"):
                times.setdefault((kind, arm), []).append(time_call(act))
    return [{"kind": kind, "arm": arm, **summarize(samples)} for (kind, arm), samples in times.items()]


def measure_tpm(device: TpmDevice, rounds: int) -> list[dict[str, Any]]:
    """Time the path to a key and its parts."""
    path: Any = importlib.import_module("key_path")

    def bind() -> Binding:
        return Binding(secrets.token_bytes(32), b"\x0b" * 32, path.RUN, path.ROLE)

    with TpmAttester(device, PCRS) as attester:
        company = path.Company(path.policy_for(attester, bind()))
        sealer, counter = TpmSealer(device, PCRS), TpmCounter.create_counter(device)
        sealed = sealer.seal_secret(path.KEY)
        acts: dict[str, Callable[[], object]] = {
            "whole path": lambda: path.whole_path(company, attester),
            "quote": lambda: attester.make_evidence(bind()),
            "unseal": lambda: sealer.unseal_secret(sealed),
            "counter": counter.increment,
        }
        times: dict[str, Times] = {name: [] for name in acts}
        for _ in range(rounds):
            for name, act in acts.items():
                times[name].append(time_call(act))
    return [{"act": name, **summarize(samples)} for name, samples in times.items()]


def time_call(act: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU milliseconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return (time.perf_counter() - wall) * 1000, (time.process_time() - cpu) * 1000


def summarize(times: Times) -> dict[str, float]:
    """Return the figures of many calls."""
    ordered = sorted(wall for wall, _ in times)
    return {
        "lowest_ms": ordered[0],
        "median_ms": statistics.median(ordered),
        "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "median_cpu_ms": statistics.median(cpu for _, cpu in times),
    }


if __name__ == "__main__":
    parser = program_parser(__doc__)
    parser.add_argument("--path", choices=("appraisal", "tpm"), required=True)
    parser.add_argument("--rounds", type=int, default=200)
    run_program("attestation", parser, measure)
