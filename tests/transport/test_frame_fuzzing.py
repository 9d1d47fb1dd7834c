"""10,000 malformed frames: only our errors, no hang, and an honest frame still gets through afterwards."""

import random
import struct

import pytest
from made_frames import frame_bytes, header_values, refusal

from phalanx.config import canonical_json
from phalanx.errors import FrameError
from phalanx.transport import TransportConfig, parse_frame

NUM_FRAMES = 10_000
LIMITS = TransportConfig(timeout_s=0.2, max_frame_bytes=2**20, max_queued_bytes=2**24)
PAYLOAD = bytes(range(256)) * 2
NASTY = [
    *[None, True, False, 0, -1, 1.5, -0.0, 1e308, 2**63, 2**64, -(2**200), 10**400],
    *["", "x" * 5000, "0" * 64, "\x00", "../../x", "é" * 70, "run-1", "owner", "worker", "mallory"],
    *[[], [[]], [None] * 1000, {}, {"": {}}],
]
NASTY_JSON = [
    *[b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"-" + b"9" * 5000],
    *[b"01", b"1.", b".5", b"+1", b"0x10", b"1_000", b"1,", b"undefined", b"", b"'x'", b"// comment"],
    *[b"\xff", b'"\xc0\x80"', b'"\\ud800"', b"[" * 2000 + b"]" * 2000, b'{"a":' * 500 + b"1" + b"}" * 500],
]


def flip_bits(rng, raw, sign):
    damaged = bytearray(raw)
    for _ in range(rng.randint(1, 8)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(rng, raw, sign):
    return raw[: rng.randrange(len(raw))]


def extend(rng, raw, sign):
    return raw + rng.randbytes(rng.randint(1, 300))


def move_bytes(rng, raw, sign):
    start, end = sorted(rng.sample(range(len(raw)), 2))
    return raw[:start] + raw[end:] + raw[start:end] + b"x"


def wrong_length(rng, raw, sign):
    length = rng.choice([0, 1, 2**20, 2**20 + 1, 2**31, 2**32 - 1, len(raw), rng.randrange(2**32)])
    return struct.pack(">4sBI", b"PHLX", 1, length) + raw[9:]


def noise(rng, raw, sign):
    return rng.choice([b"", b"PHLX", b"PHLX\x01"]) + rng.randbytes(rng.randrange(600))


def is_well_formed(name, value):
    # a party that signs an odd kind or body in the right form is heard; what it means is for others to judge
    if name == "body":
        return isinstance(value, dict)
    if name == "kind":
        return value in ("run-1", "owner", "worker", "mallory")
    return type(value) in (str, int) and value == header_values(payload=PAYLOAD)[name]


def nasty_value(rng, raw, sign):
    values = header_values(payload=PAYLOAD)
    name = rng.choice(sorted(values))
    fresh = [value for value in NASTY if not is_well_formed(name, value)]
    return sign({**values, name: rng.choice(fresh)})


def nasty_text(rng, raw, sign):
    values = header_values(payload=PAYLOAD)
    name = rng.choice(sorted(values))
    before, after = canonical_json({name: values[name]})[1:-1], f'"{name}":'.encode() + rng.choice(NASTY_JSON)
    return sign(canonical_json(values).replace(before, after))


def nasty_body(rng, raw, sign):
    text = canonical_json(header_values(payload=PAYLOAD))
    return sign(text.replace(b'{"step":1}', b'{"step":' + rng.choice(NASTY_JSON) + b"}"))


def other_form(rng, raw, sign):
    text = canonical_json(header_values(payload=PAYLOAD))
    return sign(
        rng.choice([
            text.replace(b",", b", "),
            text.replace(b'"run":"run-1"', b'"run":"run-1","run":"run-1"'),
            text.replace(b'"kind"', b'"\\u006bind"'),
            text.replace(b"{", b"[", 1),
            b"\xef\xbb\xbf" + text,
            text + b"\n",
            text[:-1],
            text[:-1] + b',"zzz":1}',
            b"[" * rng.randint(1, 100_000),
            b'{"a":' * rng.randint(1, 50_000),
            text.decode().encode("utf-16"),
        ])
    )  # fmt: skip


def swap_fields(rng, raw, sign):
    values = header_values(payload=PAYLOAD)
    one, other = rng.sample(sorted(values), 2)
    values[one], values[other] = values[other], values[one]
    return sign(values)


MUTATIONS = [
    *[flip_bits, cut, extend, move_bytes, wrong_length, noise],
    *[nasty_value, nasty_text, nasty_body, other_form, swap_fields],
]


def malformed_frames(identity, seed):
    """Yield frames that differ from an honest one; half of them with a signature that holds."""
    rng = random.Random(seed)
    honest = frame_bytes(identity, header_values(payload=PAYLOAD), PAYLOAD)
    made = 0
    while made < NUM_FRAMES:
        mutation = rng.choice(MUTATIONS)
        raw = mutation(rng, honest, lambda header: frame_bytes(identity, header, PAYLOAD))
        if raw != honest:
            made += 1
            yield raw


@pytest.fixture(scope="module")
def seed():
    return 20_241_117


def test_parsing_10_000_malformed_frames_raises_only_our_error(parties, seed):
    num_refused = 0
    for raw in malformed_frames(parties.identities["worker"], seed):
        try:
            parse_frame(raw, LIMITS)
        except FrameError:
            num_refused += 1

    # what passes is well-formed and wrong in a way that only signature, chain or digest show
    assert num_refused > NUM_FRAMES * 0.8


def test_an_endpoint_refuses_10_000_malformed_frames_and_takes_the_honest_one_afterwards(parties, seed):
    owner, worker = parties.make("owner", LIMITS), parties.identities["worker"]

    answers = {refusal(owner.answer_frame(raw, "worker")) for raw in malformed_frames(worker, seed)}

    assert answers == {"FrameError", "SignatureError", "PeerRefusedError", "OrderError"}
    assert owner.refusal_counts["worker"] == NUM_FRAMES
    assert owner.receive_item(0.0) is None
    honest = frame_bytes(worker, header_values(payload=PAYLOAD), PAYLOAD)
    assert refusal(owner.answer_frame(honest, "worker")) == ""
    assert owner.receive_item(0.0).payload == PAYLOAD
