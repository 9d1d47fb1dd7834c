"""A bench of secure sums: a whole round, processor time of a client and of the server, and bytes.

``python -m phalanx.lab.bench.alone.secure_sum OUT.json [--values 40000000] [--clients 11]``

All clients and the server take turns in one thread of one process. The same rounding is done once more without masks,
outside of what is timed, so that the sum can be compared bit by bit. `mask_cpu_s` covers a client's work on its
values: norm, clip, rounding, masks of all neighbours and its own, digest.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from phalanx.lab.bench.measure.harness import run_program
from phalanx.security.aggregate import CohortMember, ExpectedRound, SumClient, SumServer, SumTerms, Words
from phalanx.security.aggregate.encoding import norm_of
from phalanx.security.aggregate.masks import masked_values
from phalanx.security.crypto import Identity

Found = TypeVar("Found")


class FixedRound:
    """A book of rounds for a bench, which enters one."""

    def enter_round(self, run: str, number: int) -> None:
        """Let it in."""


class KeptRounding:
    """Random bytes of the system, of which the last are kept: a client draws its rounding key last."""

    def __init__(self) -> None:
        self.last = b""

    def __call__(self, count: int) -> bytes:
        """Draw."""
        self.last = np.random.default_rng().bytes(count)
        return self.last


class Stopwatch:
    """Processor seconds of this thread, by operation."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time_action(self, name: str, action: Callable[[], Found]) -> Found:
        """Do something and note how long it took."""
        started = time.thread_time()
        result = action()
        self.seconds.setdefault(name, []).append(time.thread_time() - started)
        return result


def measure_secure_sum(values: int, clients: int) -> dict[str, Any]:
    """Walk one round of clients that all have the same values, and round them differently."""
    server_identity = Identity.without_certificate("server")
    identities = [Identity.without_certificate(f"site-{number:03d}") for number in range(clients)]
    roster = {identity.name: identity.public for identity in identities}
    cohort = tuple(CohortMember(name=identity.name, key=identity.public.public_key.hex()) for identity in identities)
    facts = {"run": "bench", "run_digest": "1" * 64, "model_digest": "2" * 64, "round": 1, "clip": 1.0, "minimum": 3}
    terms = SumTerms.model_validate({**facts, "cohort": cohort, "length": values})
    expected = ExpectedRound("bench", "1" * 64, "2" * 64, values, server_identity.public, roster, 3)
    watch, server = Stopwatch(), SumServer(terms, server_identity)
    fresh = {identity.name: KeptRounding() for identity in identities}
    sites = {
        identity.name: SumClient(identity, expected, FixedRound(), fresh[identity.name]) for identity in identities
    }
    sent = {identity.name: 0 for identity in identities}
    delta = np.random.default_rng(1).standard_normal(values, np.float32)
    delta *= np.float32(0.5 / norm_of(delta))

    def say(name: str, phase: str, action: Callable[[], bytes]) -> bytes:
        message = watch.time_action(f"client_{phase}", action)
        sent[name] += len(message)
        return message

    for name, client in sites.items():
        server.take_advert(say(name, "join", partial(client.join_round, server.invitation)))
    adverts = server.close_adverts()
    for name, client in sites.items():
        server.take_boxes(say(name, "share", partial(client.share_secrets, adverts)))
    deliveries, plain = server.close_boxes(), np.zeros(values + 1, np.uint32)
    for name, client in sites.items():
        deposit = watch.time_action("mask", partial(client.mask_values, deliveries[name], delta))
        sent[name] += len(deposit.message)
        watch.time_action("server_take", partial(server.take_deposit, deposit.message, deposit.values))
        plain += encode_unmasked(terms, delta, fresh[name].last)
    deposits = server.close_deposits()
    for name, client in sites.items():
        server.take_consent(say(name, "consent", partial(client.sign_consent, deposits)))
    consents = server.close_consents()
    for name, client in sites.items():
        server.take_release(say(name, "release", partial(client.release_shares, consents)))
    result = watch.time_action("server_unmask", server.unmask_sum)
    others = sum(sum(watch.seconds[f"client_{phase}"]) for phase in ("join", "share", "consent", "release"))
    return {
        "values": values,
        "clients": clients,
        "neighbours": terms.graph_degree.neighbours,
        "mask_cpu_s": statistics.median(watch.seconds["mask"]),
        "mask_cpu_s_each": watch.seconds["mask"],
        "ns_per_value_and_mask": statistics.median(watch.seconds["mask"]) / values / clients * 1e9,
        "client_other_cpu_s": others / clients,
        "server_take_cpu_s": statistics.median(watch.seconds["server_take"]),
        "server_unmask_cpu_s": watch.seconds["server_unmask"][0],
        "bytes_per_value": deposit.values.nbytes / values,
        "client_other_bytes": max(sent.values()),
        "bit_exact": bool(np.array_equal(result.total.view(np.uint32), plain[:-1])),
        "mean_error_in_steps": float(np.abs(result.mean_values() - delta).max() / terms.ring_encoding.step_size),
    }


def measure_row(values: int = 40_000_000, clients: int = 11) -> dict[str, Any]:
    """Measure one round."""
    return {"rows": [measure_secure_sum(values, clients)]}


def encode_unmasked(terms: SumTerms, delta: np.ndarray, rounding_key: bytes) -> Words:
    """Encode once more as a client did."""
    return masked_values(
        delta, terms.ring_encoding, (terms.ring_encoding.scale_for(norm_of(delta)), 1), rounding_key, []
    )


if __name__ == "__main__":
    run_program("secure-sum", measure_row)
