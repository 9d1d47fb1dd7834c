"""Write tests/vectors/secure_sum/round.json: one whole round of a secure sum with known randomness.

``python scripts/secure_sum_vectors.py``; docs/secure_aggregation.md says what each field is.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from phalanx.security.aggregate import CohortMember, ExpectedRound, SumClient, SumServer, SumTerms
from phalanx.security.crypto import Identity

FILE = Path(__file__).parents[1] / "tests" / "vectors" / "secure_sum" / "round.json"
NAMES = ("clinic-a", "clinic-b", "clinic-c", "clinic-d")
DROPPED = "clinic-d"
"""It shares its secrets and sends no values."""


class NoRounds:
    """A book of rounds for vectors, which are made again and again."""

    def enter_round(self, run: str, number: int) -> None:
        """Let it in."""


def identity(name: str) -> Identity:
    """Return the identity of a name, which all can make: for vectors alone."""
    return Identity(name, Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"vector {name}".encode()).digest()))


def known_bytes(name: str, drawn: list[str]) -> Callable[[int], bytes]:
    """Return a source of known bytes in the place of the system's generator; it notes what it gives."""

    def draw(count: int) -> bytes:
        found = hashlib.shake_256(f"{name} {len(drawn)}".encode()).digest(count)
        drawn.append(found.hex())
        return found

    return draw


def make() -> dict[str, object]:
    """Walk the round and return all of it."""
    server_identity, identities = identity("server"), [identity(name) for name in NAMES]
    cohort = tuple(CohortMember(name=one.name, key=one.public.public_key.hex()) for one in identities)
    terms = SumTerms(
        run="vectors", run_digest="1" * 64, model_digest="2" * 64, round=7, cohort=cohort, length=6, clip=1.0,
        max_weight=5, minimum=3,
    )  # fmt: skip
    roster = {one.name: one.public for one in identities}
    expected = ExpectedRound("vectors", "1" * 64, "2" * 64, 6, server_identity.public, roster, 3)
    server = SumServer(terms, server_identity)
    drawn: dict[str, list[str]] = {name: [] for name in NAMES}
    clients = {
        one.name: SumClient(one, expected, NoRounds(), known_bytes(one.name, drawn[one.name])) for one in identities
    }
    values = {name: (np.arange(6) - 2 + number) / 10 for number, name in enumerate(NAMES)}
    said: dict[str, dict[str, str]] = {name: {} for name in NAMES}

    def walk(phase: str, names: list[str], take: Callable[[bytes], str], say: Callable[[SumClient], bytes]) -> None:
        for name in names:
            message = say(clients[name])
            said[name][phase] = message.decode()
            take(message)

    left = [name for name in NAMES if name != DROPPED]
    walk("advert", list(NAMES), server.take_advert, lambda one: one.join_round(server.invitation))
    adverts = server.close_adverts()
    walk("boxes", list(NAMES), server.take_boxes, lambda one: one.share_secrets(adverts))
    deliveries, masked = server.close_boxes(), {}
    for weight, name in enumerate(left, start=1):
        deposit = clients[name].mask_values(deliveries[name], values[name], weight)
        said[name]["deposit"], masked[name] = deposit.message.decode(), deposit.values.tobytes().hex()
        server.take_deposit(deposit.message, deposit.values)
    deposits = server.close_deposits()
    walk("consent", left, server.take_consent, lambda one: one.sign_consent(deposits))
    consents = server.close_consents()
    walk("release", left, server.take_release, lambda one: one.release_shares(consents))
    result = server.unmask_sum()
    return {
        "terms": server.invitation.decode(),
        "terms_digest": terms.terms_digest,
        "levels": terms.ring_encoding.max_level,
        "signing_keys": {one.name: one.signing_key.private_bytes_raw().hex() for one in (server_identity, *identities)},
        "drawn": drawn,
        "values": {name: list(map(float, one)) for name, one in values.items()},
        "weights": {name: weight for weight, name in enumerate(left, start=1)},
        "server_messages": {
            "adverts": adverts.decode(),
            "deliveries": {name: one.decode() for name, one in deliveries.items()},
            "deposits": deposits.decode(),
            "consents": consents.decode(),
        },
        "client_messages": said,
        "masked_values": masked,
        "total": result.total.tolist(),
        "weight": result.weight,
    }


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(make(), indent=1) + "\n", encoding="utf-8")
