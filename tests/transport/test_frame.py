import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_frames import frame_bytes, header_values

from phalanx.errors import FrameError, SignatureError
from phalanx.security.crypto import Identity, digest_hex
from phalanx.transport import (
    HeaderFields,
    SignedHeader,
    TransportConfig,
    check_payload,
    encode_frame,
    parse_frame,
    sign_header,
)
from phalanx.transport.frame import MAX_HEADER_BYTES, Receipt, sign_receipt

WORKER = Identity.without_certificate("worker")
OTHER = Identity.without_certificate("other")
LIMITS = TransportConfig(max_frame_bytes=4 * 1024 * 1024)


@given(st.binary(max_size=300))
def test_a_frame_is_read_back_as_it_was_written(payload):
    header = sign_header(WORKER, HeaderFields(**header_values(payload=payload)))

    frame = parse_frame(encode_frame(header, [payload[:5], memoryview(payload)[5:]]), LIMITS)

    frame.header.verify_sender(WORKER.public)
    check_payload(frame)
    assert frame.payload == payload
    assert frame.header == header
    assert frame.header.fields.body == {"step": 1}


def test_a_payload_is_a_read_only_view_into_the_received_bytes():
    raw = bytearray(frame_bytes(WORKER, header_values(payload=b"abc"), b"abc"))

    payload = parse_frame(raw, LIMITS).payload

    assert payload.obj is raw
    assert payload.readonly


def test_a_header_outlives_its_payload_as_evidence():
    header = sign_header(WORKER, HeaderFields(**header_values()))

    kept = SignedHeader(header.header_bytes, header.signature)

    kept.verify_sender(WORKER.public)
    assert kept.fields.kind == "activation"
    assert kept.header_digest == digest_hex(header.header_bytes)


def test_a_header_is_not_of_a_peer_with_another_name_or_key():
    header = sign_header(WORKER, HeaderFields(**header_values()))

    with pytest.raises(SignatureError, match="key of other"):
        header.verify_sender(OTHER.public)
    with pytest.raises(SignatureError):
        header.verify_sender(Identity.without_certificate("worker").public)


def test_evidence_that_is_no_header_is_refused():
    with pytest.raises(FrameError):
        SignedHeader(b"[]", bytes(64)).verify_sender(WORKER.public)


def test_a_receipt_is_proof_against_its_receiver_only():
    receipt = sign_receipt(WORKER, "ab" * 32)

    receipt.verify_receiver(WORKER.public)
    with pytest.raises(SignatureError):
        receipt.verify_receiver(OTHER.public)
    with pytest.raises(SignatureError):
        Receipt("worker", "cd" * 32, receipt.signature).verify_receiver(WORKER.public)
    with pytest.raises(SignatureError):
        Receipt("worker", "AB" * 32, receipt.signature).verify_receiver(WORKER.public)


def test_a_signature_over_a_header_is_no_receipt():
    header = sign_header(WORKER, HeaderFields(**header_values()))

    with pytest.raises(SignatureError):
        Receipt("worker", header.header_digest, header.signature).verify_receiver(WORKER.public)


def test_a_payload_with_one_flipped_bit_blames_nobody():
    raw = bytearray(frame_bytes(WORKER, header_values(payload=b"abc"), b"abc"))
    raw[-1] ^= 1

    frame = parse_frame(bytes(raw), LIMITS)

    frame.header.verify_sender(WORKER.public)
    with pytest.raises(FrameError, match="do not match the signed digest"):
        check_payload(frame)


@pytest.mark.parametrize("cut", range(1, 400, 7))
def test_a_truncated_frame_is_refused_wherever_it_ends(cut):
    raw = frame_bytes(WORKER, header_values(payload=b"abc"), b"abc")

    with pytest.raises(FrameError):
        parse_frame(raw[:-cut], LIMITS)


def test_bytes_after_the_payload_are_refused():
    with pytest.raises(FrameError, match="payload has 1 bytes"):
        parse_frame(frame_bytes(WORKER, header_values()) + b"x", LIMITS)


def test_the_size_of_a_frame_is_allowed_up_to_its_limit():
    raw = frame_bytes(WORKER, header_values(payload=bytes(5000)), bytes(5000))

    assert parse_frame(raw, TransportConfig(max_frame_bytes=len(raw)))
    with pytest.raises(FrameError, match="at most"):
        parse_frame(raw, TransportConfig(max_frame_bytes=len(raw) - 1))


@pytest.mark.parametrize(
    "prefix",
    [
        struct.pack(">4sBI", b"PHLY", 1, 10),
        struct.pack(">4sBI", b"PHLX", 2, 10),
        struct.pack(">4sBI", b"PHLX", 1, 0),
        struct.pack(">4sBI", b"PHLX", 1, MAX_HEADER_BYTES + 1),
        struct.pack(">4sBI", b"PHLX", 1, 2**32 - 1),
    ],
)
def test_a_wrong_prefix_is_refused(prefix):
    with pytest.raises(FrameError):
        parse_frame(prefix + bytes(MAX_HEADER_BYTES + 100), LIMITS)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": ""},
        {"run": "a b"},
        {"run": "r" * 129},
        {"run": 1},
        {"kind": "Upper"},
        {"kind": "k" * 65},
        {"kind": None},
        {"sender": "no_such.name"},
        {"receiver": "../owner"},
        {"sequence": -1},
        {"sequence": True},
        {"sequence": 1.0},
        {"sequence": "0"},
        {"sequence": 2**63},
        {"previous": "AB" * 32},
        {"previous": ""},
        {"payload_size": -1},
        {"payload_size": 2**62},
        {"payload_size": False},
        {"payload_digest": "0" * 63},
        {"body": []},
        {"body": None},
        {"more": 1},
    ],
)
def test_a_mistyped_header_is_refused_although_it_is_signed(changes):
    with pytest.raises(FrameError):
        parse_frame(frame_bytes(WORKER, header_values(**changes)), LIMITS)


@pytest.mark.parametrize("name", sorted(header_values()))
def test_a_header_without_one_of_its_fields_is_refused(name):
    values = header_values()
    del values[name]

    with pytest.raises(FrameError, match="keys"):
        parse_frame(frame_bytes(WORKER, values), LIMITS)


@pytest.mark.parametrize(
    "body",
    [
        {"x": math.inf},
        {"x": b"bytes"},
        {"x": 2**64},
        {2: 1, 10: 1},
        {"x": "a" * MAX_HEADER_BYTES},
        {"x": {1, 2}},
    ],
    ids=["infinite", "bytes", "integer", "keys", "size", "set"],
)
def test_a_body_that_the_receiver_would_refuse_is_never_signed(body):
    with pytest.raises(FrameError):
        sign_header(WORKER, HeaderFields(**header_values(body=body)))


def test_what_is_no_run_of_bytes_is_refused():
    strided = memoryview(bytes(1000))[::2]

    with pytest.raises(FrameError, match="run of bytes"):
        parse_frame(strided, LIMITS)
