"""The published vectors come out again, and a second program made from the specification alone agrees with them."""

import hashlib
import hmac
import importlib.util
import json
import math
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB

ROOT = Path(__file__).parents[3]
ROUND = ROOT / "tests" / "vectors" / "secure_sum" / "round.json"
PRIME = 2**256 + 297


@pytest.fixture(scope="module")
def published():
    return json.loads(ROUND.read_text(encoding="utf-8"))


def test_the_published_round_comes_out_again(published):
    spec = importlib.util.spec_from_file_location("secure_sum_vectors", ROOT / "scripts" / "secure_sum_vectors.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    assert script.make() == published


def canonical(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def in_domain(name: str, data: bytes) -> bytes:
    return b"phalanx/" + name.encode() + b"\0" + data


def hkdf(secret: bytes, info: bytes) -> bytes:
    extracted = hmac.digest(bytes(32), secret, hashlib.sha256)
    return hmac.digest(extracted, info + b"\1", hashlib.sha256)


def stream(key: bytes, count: int) -> list[int]:
    """AES-256 of the block numbers 0, 1, ...: words of four bytes, little-endian."""
    encryptor = Cipher(AES256(key), ECB()).encryptor()
    data = b"".join(encryptor.update(number.to_bytes(16, "big")) for number in range(count // 4 + 1))
    return [int.from_bytes(data[4 * i : 4 * i + 4], "little") for i in range(count)]


def agreed(private: str, public: str) -> bytes:
    own = X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
    return own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))


def at_zero(points: dict[int, int]) -> int:
    total = 0
    for x, y in points.items():
        weight = 1
        for other in points:
            if other != x:
                weight = weight * other * pow(other - x, -1, PRIME) % PRIME
        total += y * weight
    return total % PRIME


class SecondProgram:
    """A reader of the vectors that uses nothing of Phalanx."""

    def __init__(self, published) -> None:
        self.all = published
        self.terms = json.loads(published["terms"])["body"]
        self.digest = blake3(in_domain("aggregate-terms/1", canonical(self.terms))).hexdigest()
        self.names = [member["name"] for member in self.terms["cohort"]]
        self.adverts = {name: json.loads(one["advert"])["body"] for name, one in published["client_messages"].items()}

    def pair_stream(self, own: str, mask_private: str, other: str, count: int) -> list[int]:
        ends = sorted([[name, self.adverts[name]["mask_key"]] for name in (own, other)])
        info = in_domain("aggregate-mask/1", canonical([self.digest, *ends]))
        sign = 1 if own < other else -1
        return [sign * word for word in stream(hkdf(agreed(mask_private, ends[own < other][1]), info), count)]

    def self_stream(self, name: str, seed: str, count: int) -> list[int]:
        info = in_domain("aggregate-self-mask/1", canonical([self.digest, name]))
        return stream(hkdf(bytes.fromhex(seed), info), count)

    def encoded(self, name: str, rounding_key: str) -> list[int]:
        values, weight = self.all["values"][name], self.all["weights"][name]
        norm = sum(value * value for value in values) ** 0.5
        scale = min(1.0, self.terms["clip"] / norm) / (self.terms["clip"] / self.all["levels"])
        words = stream(bytes.fromhex(rounding_key), len(values))
        rounded = [math.floor(value * scale + word / 2**32) for value, word in zip(values, words, strict=True)]
        return [*(weight * one for one in rounded), weight]


def test_a_second_program_finds_the_same_digest_masks_and_sum(published):
    second = SecondProgram(published)
    count = second.terms["length"] + 1
    assert second.digest == published["terms_digest"]
    assert published["levels"] == (2**31 - 1) // (len(second.names) * second.terms["max_weight"])

    totals = [0] * count
    for name, text in published["masked_values"].items():
        _, mask_private, seed, *_ = published["drawn"][name]
        own = second.encoded(name, published["drawn"][name][-1])
        streams = [second.pair_stream(name, mask_private, other, count) for other in second.names if other != name]
        streams.append(second.self_stream(name, seed, count))
        masked = [(sum(column)) % 2**32 for column in zip(own, *streams, strict=True)]
        assert b"".join(word.to_bytes(4, "little") for word in masked).hex() == text
        totals = [a + b for a, b in zip(totals, own, strict=True)]

    assert totals == [*published["total"], published["weight"]]


def test_a_second_program_puts_released_shares_together(published):
    second = SecondProgram(published)
    released = {
        name: json.loads(one["release"])["body"]
        for name, one in published["client_messages"].items()
        if "release" in one
    }

    for name in second.names:
        kind, place = ("seed_shares", 2) if name in released else ("key_shares", 1)
        shares = {
            second.names.index(h) + 1: int(one[kind][name], 16) for h, one in released.items() if name in one[kind]
        }
        found = at_zero(dict(list(shares.items())[:2]))
        assert found.to_bytes(32, "big").hex() == published["drawn"][name][place]
