import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import FrameError
from phalanx.pipeline.protocol import tensor_stream as bulk
from phalanx.pipeline.protocol.messages import Bulk, FetchBulk
from phalanx.pipeline.protocol.tensor_stream import (
    BulkReceiver,
    cut_parts,
    digest_of_parts,
    send_bulk,
    tensors_digest,
    transfer_digest,
)
from phalanx.security.crypto import digest_hex

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def tensor_sets(draw):
    names = draw(st.lists(st.text("abc/.", min_size=1, max_size=6), max_size=6, unique=True))
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(draw(shapes), generator=generator).to(draw(dtypes)) for name in names}


def joined(tensors):
    return b"".join(bytes(piece) for _, _, part in cut_parts(tensors) for piece in part)


@given(tensor_sets(), st.integers(1, 200))
def test_any_size_of_parts_gives_the_same_tensors(tensors, part_bytes):
    receiver = BulkReceiver(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "PART_BYTES", part_bytes)
        found = None
        for offset, total, part in cut_parts(tensors):
            data = b"".join(part)
            assert len(data) <= part_bytes
            assert found is None
            found = receiver.add_part(offset, total, memoryview(data))

    assert found is not None
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert all(found[name].dtype == tensors[name].dtype for name in tensors)


@given(tensor_sets(), st.integers(0, 200))
def test_a_part_of_another_size_than_it_must_have_is_refused(tensors, size):
    # a trickle of small or empty ones would keep whoever waits for the rest waiting for ever
    data = joined(tensors)
    if size == len(data):
        return

    with pytest.raises(FrameError, match=f"expected {len(data)} bytes at 0 of {len(data)}"):
        BulkReceiver(tensors).add_part(0, len(data), memoryview(bytes(size)))


TWO = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}


@pytest.mark.parametrize(
    ("offset", "total", "size"),
    [(0, 31, 8), (0, 33, 8), (4, 32, 8), (0, 32, 33), (0, 0, 0), (0, 2**60, 8), (32, 32, 0)],
)
def test_a_part_that_does_not_follow_is_refused(offset, total, size):
    with pytest.raises(FrameError, match="expected 32 bytes at 0 of 32"):
        BulkReceiver(TWO).add_part(offset, total, memoryview(bytes(size)))


def test_a_part_after_the_last_or_said_twice_is_refused(monkeypatch):
    monkeypatch.setattr(bulk, "PART_BYTES", 16)
    receiver = BulkReceiver(TWO)
    assert receiver.add_part(0, 32, memoryview(bytes(16))) is None
    with pytest.raises(FrameError, match="expected 16 bytes at 16"):
        receiver.add_part(0, 32, memoryview(bytes(16)))
    assert receiver.add_part(16, 32, memoryview(bytes(16))) is not None

    with pytest.raises(FrameError):
        receiver.add_part(32, 32, memoryview(b""))


def test_received_tensors_have_memory_of_their_own():
    data = bytearray(joined(TWO))
    found = BulkReceiver(TWO).add_part(0, 32, memoryview(data))

    data[:] = bytes(32)

    assert found is not None
    assert torch.equal(found["b"], TWO["b"])


def test_expected_tensors_may_have_no_memory():
    receiver = BulkReceiver({name: tensor.to("meta") for name, tensor in TWO.items()})

    found = receiver.add_part(0, 32, memoryview(joined(TWO)))

    assert found is not None
    assert torch.equal(found["a"], TWO["a"])


def test_a_transfers_digest_is_known_to_sender_and_receiver_without_hashing_twice(monkeypatch):
    monkeypatch.setattr(bulk, "PART_BYTES", 10)
    sent = []

    def post(receiver, message, payload):
        sent.append((receiver, message, b"".join(payload)))

    about = FetchBulk(epoch=1, step=5, stage=2, purpose="gradient")

    digest = send_bulk(post, "worker-2", about, TWO, 7)

    assert digest == transfer_digest(TWO) == digest_of_parts([digest_hex(data) for _, _, data in sent])
    assert {receiver for receiver, _, _ in sent} == {"worker-2"}
    assert [message for _, message, _ in sent] == [
        Bulk(epoch=1, step=7, stage=2, purpose="gradient", offset=offset, total=32) for offset in (0, 10, 20, 30)
    ]


def test_nothing_at_all_is_one_empty_part():
    assert [(offset, total, len(part)) for offset, total, part in cut_parts({})] == [(0, 0, 0)]
    assert BulkReceiver({}).add_part(0, 0, memoryview(b"")) == {}


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.arange(4.0)},
        {"a": torch.arange(4.0), "c": torch.ones(2, 2)},
        {"a": torch.arange(4.0), "b": torch.ones(4)},
        {"a": torch.arange(4.0), "b": torch.ones(2, 2).view(torch.int32)},
        {"a": torch.tensor([0.0, 1.0, 2.0, 3.0000002]), "b": torch.ones(2, 2)},
        {"a": torch.tensor([-0.0, 1.0, 2.0, 3.0]), "b": torch.ones(2, 2)},
    ],
)
def test_a_digest_of_tensors_covers_names_shapes_types_and_every_bit(other):
    assert tensors_digest(other) != tensors_digest(TWO)
    assert tensors_digest(dict(reversed(TWO.items()))) == tensors_digest(TWO)
