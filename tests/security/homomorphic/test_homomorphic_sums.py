"""Homomorphic sums: exact, opened by the right key alone, and refused where anything is not as agreed."""

import json
import struct

import numpy as np
import pytest

from phalanx.config import canonical_json
from phalanx.errors import AggregationError
from phalanx.security.homomorphic import (
    HomomorphicTerms,
    SumKey,
    check_part,
    decrypt_sum,
    encrypt_values,
    new_key,
    sum_ciphertexts,
)

pytest.importorskip("tenseal", reason="needs the extra `he`")

NAMES = ("a", "b", "c", "d")
LENGTH = 5000


@pytest.fixture(scope="module")
def key():
    return new_key()


@pytest.fixture(scope="module")
def values():
    generator = np.random.default_rng(3)
    return {name: generator.normal(size=LENGTH) / 100 for name in NAMES}


def terms_of(key, **changes):
    given = {"run": "run", "round": 1, "clients": NAMES, "minimum": 3, "length": LENGTH, "clip": 1.0}
    return HomomorphicTerms(**{**given, "key": key.public_digest, **changes})


@pytest.fixture(scope="module")
def parts(key, values):
    return {name: encrypt_values(key.public, terms_of(key), name, values[name]) for name in NAMES}


def integers(terms, values):
    scale = min(1.0, terms.clip / np.linalg.norm(values)) * terms.max_level / terms.clip
    return np.rint(values * scale).astype(np.int64)


def test_a_sum_is_exact_and_a_server_adds_without_a_secret(key, values, parts):
    terms = terms_of(key)

    total = sum_ciphertexts(key.public, terms, list(parts.values()))
    opened = decrypt_sum(key, terms, total)

    assert opened.clients == NAMES
    assert (opened.total == sum(integers(terms, one) for one in values.values())).all()
    assert np.abs(opened.mean - np.mean(list(values.values()), axis=0)).max() < 1e-7
    # 4095 values and a mark in each ciphertext: 3.8 times float32, and nothing that grows with the sum
    assert len(total) / (4 * 4095 * terms.num_blocks) < 3.9


def test_a_client_with_large_values_is_clipped_and_the_largest_sum_does_not_wrap(key):
    terms = terms_of(key, length=3)
    loud = np.array([1e6, 0.0, 0.0])

    parts = [encrypt_values(key.public, terms, name, loud) for name in NAMES]
    opened = decrypt_sum(key, terms, sum_ciphertexts(key.public, terms, parts))

    assert opened.total[0] == 4 * terms.max_level
    assert opened.mean[0] == pytest.approx(1.0)


def test_another_secret_key_opens_nothing(key, parts):
    terms, other = terms_of(key), new_key()
    total = sum_ciphertexts(key.public, terms, list(parts.values()))

    # even where its holder says that it is the right one
    with pytest.raises(AggregationError, match="of another key, or altered"):
        decrypt_sum(SumKey(key.public, other.secret), terms, total)
    with pytest.raises(AggregationError, match="the terms say"):
        decrypt_sum(other, terms, total)
    with pytest.raises(AggregationError, match="is no secret one"):
        decrypt_sum(SumKey(key.public, key.public), terms, total)
    with pytest.raises(AggregationError, match="is no public one"):
        encrypt_values(key.secret, terms_of(SumKey(key.secret, b"")), "a", np.zeros(LENGTH))


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [(("a", "b"), "too_few"), (("a", "b", "c", "a"), "foreign_party")],
)
def test_a_sum_of_too_few_or_of_one_client_twice_is_refused(key, parts, chosen, reason):
    with pytest.raises(AggregationError) as caught:
        sum_ciphertexts(key.public, terms_of(key), [parts[name] for name in chosen])

    assert caught.value.reason == reason


@pytest.mark.parametrize("changed", [{"round": 2}, {"run": "other"}, {"clip": 2.0}, {"minimum": 4}])
def test_values_of_another_round_are_refused(key, parts, changed):
    with pytest.raises(AggregationError, match="are of other terms"):
        sum_ciphertexts(key.public, terms_of(key, **changed), list(parts.values()))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:3],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"\xff\xff\xff\xff" + data[4:],
        lambda data: data[:4] + b"{" + data[5:-1],
        lambda data: data.replace(b'"sizes":[', b'"sizes":[0,'),
        lambda data: data[:-40_000] + bytes(40_000),
    ],
)
def test_malformed_ciphertexts_are_refused(key, parts, spoil):
    terms = terms_of(key)
    spoiled = [spoil(parts["a"]), parts["b"], parts["c"]]

    with pytest.raises(AggregationError):
        decrypt_sum(key, terms, sum_ciphertexts(key.public, terms, spoiled))


def with_first_block(part, change):
    """A part of which the first ciphertext has another form."""
    start = 4 + int.from_bytes(part[:4], "big")
    header = json.loads(part[4:start])
    first = change(part[start : start + header["sizes"][0]])
    rest, header["sizes"][0] = part[start + header["sizes"][0] :], len(first)
    text = canonical_json(header)
    return len(text).to_bytes(4, "big") + text + first + rest


def as_ntt(block):
    zstandard = pytest.importorskip("zstandard", reason="SEAL compresses by it")
    raw = bytearray(zstandard.ZstdDecompressor().decompressobj().decompress(block[8 + 16 :]))
    # behind the digest of the parameters
    raw[32] = 1
    size = 16 + len(raw)
    varint = bytes((size & 127 | 128, size >> 7 & 127 | 128, size >> 14))
    # not compressed
    return block[:5] + varint + struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, 0, 0, size) + bytes(raw)


FORMS = {
    "no ciphertext": lambda block: block[:4],
    "two ciphertexts": lambda block: block + block[4:],
    "two halves": lambda block: b"\n\x04\x80\x10\x80\x10" + block[4:],
    "slots that wrap around": lambda block: block + b"\n\x06\xff\xff\xff\xff\x0f\x01",
    "ntt form": as_ntt,
    "nothing": lambda block: block[:1],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_vector_that_is_not_one_ciphertext_is_refused_before_it_is_added(key, parts, form):
    # TenSEAL adds as many ciphertexts as the other vector has, and reads them from memory that is not there
    forged = with_first_block(parts["a"], FORMS[form])

    check_part(key.public, terms_of(key), "a", parts["a"])
    with pytest.raises(AggregationError, match="ciphertext: "):
        check_part(key.public, terms_of(key), "a", forged)


@pytest.mark.parametrize("changed", [{"clients": ("b", "a", "c")}, {"minimum": 2}, {"clip": 0.0}, {"length": 0}])
def test_terms_that_protect_nobody_are_refused(key, changed):
    with pytest.raises(AggregationError):
        terms_of(key, **changed)


def test_values_that_are_not_finite_or_too_many_are_refused(key):
    terms = terms_of(key, length=3)
    for values in (np.array([1.0, np.nan, 0.0]), np.zeros(4), np.zeros(3, np.int64)):
        with pytest.raises(AggregationError, match="expected 3 finite ones"):
            encrypt_values(key.public, terms, "a", values)
