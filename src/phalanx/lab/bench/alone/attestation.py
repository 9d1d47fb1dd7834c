"""How long does the appraisal of evidence take, and the way from a verifier's nonce to a released key?

``python -m phalanx.lab.bench.alone.attestation OUT.json --path {appraisal,tpm} [--rounds 200]``, in a checkout: samples
and the software TPM are those of the tests. Kinds and parts take turns; milliseconds of wall and CPU time, one thread.

`appraisal`: the published evidence of ``tests/vectors``, from the envelope's bytes to the result, without a network.
`warm`: checked certificates are remembered, as in a run that appraises again; `cold`: nothing is remembered.
`tpm`: swtpm over its Unix socket, everything else in this process: nonce, fresh TLS key, quote over three PCRs,
certificate, TLS 1.3 handshake in memory, appraisal, token, its check, key release; also the parts by themselves. The
CPU time leaves out what swtpm used.
"""

import importlib
import secrets
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from phalanx.lab.bench.measure.harness import CallTime, run_program, time_turns
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


def measure(path: Literal["appraisal", "tpm"], rounds: int = 200) -> dict[str, Any]:
    """Measure one path."""
    sys.path.insert(0, str(TESTS.resolve()))
    if path == "appraisal":
        return {"name": "appraisal", "rounds": rounds, "rows": measure_appraisal(rounds)}
    with tempfile.TemporaryDirectory() as folder:
        tpm: Any = importlib.import_module("bare_tpm").BareTpm(Path(folder))
        try:
            with tpm.open() as device:
                rows = measure_tpm(device, rounds)
        finally:
            tpm.close()
    return {"name": "tpm-path", "rounds": rounds, "rows": rows}


def measure_appraisal(rounds: int) -> list[dict[str, Any]]:
    """Appraise every published kind, cold and warm."""
    cases = {kind: make() for kind, make in importlib.import_module("published").PUBLISHED.items()}
    envelopes = {kind: case.evidence.to_bytes() for kind, case in cases.items()}

    def appraise(kind: str) -> object:
        case = cases[kind]
        return appraise_evidence(parse_evidence(envelopes[kind]), case.policy, case.expected, case.now)

    def forget(name: str) -> None:
        if name.endswith(" cold"):
            for cached in (x509.parse_certificate, x509.parse_crl, signature.load_key, signature.check_x509_signature):
                cached.cache_clear()

    arms = {f"{kind} {arm}": (kind, arm) for kind in cases for arm in ("cold", "warm")}
    actions = {name: partial(appraise, kind) for name, (kind, _) in arms.items()}
    times = time_turns(actions, rounds, warm_ups=0, before=forget)
    return [{"kind": kind, "arm": arm, **summarize(times[name])} for name, (kind, arm) in arms.items()]


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
        times = time_turns(acts, rounds, warm_ups=0)
    return [{"act": name, **summarize(samples)} for name, samples in times.items()]


def summarize(times: list[CallTime]) -> dict[str, float]:
    """Return the figures of many calls."""
    ordered = sorted(1000 * sample.wall_s for sample in times)
    return {
        "lowest_ms": ordered[0],
        "median_ms": statistics.median(ordered),
        "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "median_cpu_ms": statistics.median(1000 * sample.cpu_s for sample in times),
    }


if __name__ == "__main__":
    run_program("attestation", measure)
