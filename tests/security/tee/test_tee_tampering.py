"""Whatever is altered, nothing but what was signed passes."""

import random
import re
from dataclasses import replace
from functools import cache

import pytest
from amd import Amd
from aws import Aws
from intel import Intel, sgx_body, tdx_body
from nvidia import Nvidia
from published import PUBLISHED, Case
from tcg import Tpm

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee import Binding, parse_evidence

BINDING = Binding(b"\x0a" * 32, b"\x0b" * 32, b"\x0c" * 32)
OWN = {
    "snp vlek turin": lambda: Amd("Turin", vlek=True).case(BINDING),
    "tdx 1.5 version 5": lambda: Intel().case(BINDING, 5, tdx_body(BINDING.binding_digest(), version_15=True)),
    "sgx version 4": lambda: Intel().case(BINDING, 4, sgx_body(BINDING.binding_digest())),
    "nitro own": lambda: Aws().case(BINDING),
    "tpm": lambda: Tpm().case(BINDING),
    "nv-gpu own": lambda: Nvidia().case(BINDING),
}
ALL = {**PUBLISHED, **OWN}


@cache
def made(name: str) -> Case:
    return ALL[name]()


def signed_regions(case: Case) -> list[range]:
    """Where in the evidence the bytes lie that a signature covers, the signatures themselves included."""
    data = case.evidence.data
    if case.evidence.kind == "snp":
        return [range(0x2A0), range(0x2A0, 0x2A0 + 48), range(0x2A0 + 72, 0x2A0 + 120)]
    if case.evidence.kind in ("tdx", "sgx"):
        # header, body, signature, key, report of the quoting enclave and its signature, authenticated data
        body = 384 if data[4] == 0 else 648 if data[0] == 5 else 584
        start = 48 + body + (6 if data[0] == 5 else 0)
        inner = start + 4 + 128 + (6 if data[0] > 3 else 0)
        return [range(start), range(start + 4, start + 4 + 128), range(inner, inner + 448 + 2 + 32)]
    return [range(len(data))]


def accepted(case: Case) -> bool:
    """Whether it passes; any other error than the one refusal fails the test."""
    try:
        case.appraise()
    except RefusedEvidenceError:
        return False
    return True


def flipped(data: bytes, position: int, bit: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def places_of(region: range, draw: random.Random, most: int = 40) -> list[int]:
    """Both ends of a region and places of it that are drawn; the slow test alters each bit of each byte."""
    ends = {*region[:8], *region[-8:]}
    return sorted(ends | set(draw.sample(region, min(most, len(region)))))


@pytest.mark.parametrize("name", ALL)
def test_no_byte_of_a_signed_region_can_be_altered(name):
    case, draw = made(name), random.Random(name)
    assert accepted(case)

    passed = [
        position
        for region in signed_regions(case)
        for position in places_of(region, draw)
        if accepted(case.with_data(flipped(case.evidence.data, position, draw.randrange(8))))
    ]

    assert passed == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_no_bit_of_a_signed_region_can_be_altered(name):
    case = made(name)

    passed = [
        (position, bit)
        for region in signed_regions(case)
        for position in region
        for bit in range(8)
        if accepted(case.with_data(flipped(case.evidence.data, position, bit)))
    ]

    assert passed == []


CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)


def certificate_flips(data: bytes, draw: random.Random, number: int) -> list[bytes]:
    """The data with one bit altered, at so many places of the text of certificates in it."""
    text = data.replace(rb"\n", b"\0\0")
    places = [place for found in CERTIFICATE.finditer(text) for place in range(*found.span(1))]
    return [flipped(data, place, draw.randrange(8)) for place in draw.sample(places, min(number, len(places)))]


def copies_of_certificates(case: Case) -> list[str]:
    """The parts of evidence that hold certificates as text: the quote itself, or endorsements by name."""
    parts = [""] if b"BEGIN CERTIFICATE" in case.evidence.data else []
    return parts + [name for name, data in case.evidence.endorsements.items() if b"BEGIN CERTIFICATE" in data]


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("nitro", "nitro own", "tpm")])
def test_no_certificate_that_was_sent_along_can_be_altered_not_even_a_copy_of_the_root(name):
    case, draw = made(name), random.Random(name)
    parts = copies_of_certificates(case)
    assert parts

    for part in parts:
        data = case.evidence.endorsements[part] if part else case.evidence.data
        for changed in certificate_flips(data, draw, 40):
            altered = case.with_endorsement(part, changed) if part else case.with_data(changed)
            assert not accepted(altered), part


def mutated(draw: random.Random, data: bytes) -> bytes:
    """One or a few changes: bits, whole bytes, cuts, insertions, copies, extreme lengths."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        place = draw.randrange(len(out) + 1)
        match draw.randrange(7):
            case 0 if place < len(out):
                out[place] ^= 1 << draw.randrange(8)
            case 1 if place < len(out):
                out[place] = draw.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF))
            case 2:
                del out[place:]
            case 3:
                del out[place : place + draw.randrange(1, 9)]
            case 4:
                out[place:place] = draw.randbytes(draw.randrange(1, 9))
            case 5:
                out[place : place + 4] = draw.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\0\0\0\x80"))
            case _:
                start = draw.randrange(len(out) + 1)
                out[place:place] = out[start : start + draw.randrange(1, 64)]
    return bytes(out)


def fuzz(rounds: int, seed: int) -> int:
    """Appraise mutations of everything; return how many passed although they say something else."""
    draw, wrong = random.Random(seed), 0
    names = sorted(ALL)
    for _ in range(rounds):
        case = made(draw.choice(names))
        parts = ["", *case.evidence.endorsements]
        part = draw.choice(parts)
        if part:
            changed = case.with_endorsement(part, mutated(draw, case.evidence.endorsements[part]))
        else:
            changed = case.with_data(mutated(draw, case.evidence.data))
        try:
            claims = changed.appraise().claims
        except RefusedEvidenceError:
            continue
        # a line break more in a PEM file harms nobody, as long as what is proven stays the same
        wrong += replace(claims, notes=()) != replace(case.appraise().claims, notes=())
    return wrong


def test_two_thousand_mutated_inputs_neither_crash_nor_pass():
    assert fuzz(2_000, seed=1) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_mutated_inputs_neither_crash_nor_pass():
    assert fuzz(100_000, seed=2) == 0


def test_mutated_envelopes_are_read_whole_or_refused():
    draw, envelope = random.Random(3), made("tpm").evidence.to_bytes()

    for _ in range(2_000):
        data = mutated(draw, envelope)
        try:
            parsed = parse_evidence(data)
        except RefusedEvidenceError:
            continue
        assert parsed.to_bytes() == data
