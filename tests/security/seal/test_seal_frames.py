import array
import copy
import pickle
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_pair import CUT, TERMS, CountingEpochs, other_terms, plain, shake_hands

from phalanx.errors import SealError
from phalanx.security.seal import Purpose, Receiver, Sender, TensorKind
from phalanx.security.seal.context import Context, Direction
from phalanx.security.seal.direction import DirectionState
from phalanx.security.seal.header import TAG_BYTES, SealRefusal
from phalanx.security.seal.keys import derive_ciphers

SCALAR = TensorKind(Purpose.RESULT, "loss", "float32", ())
EMPTY = TensorKind(Purpose.GRADIENT, "nothing", "float32", (3, 0))


@pytest.fixture
def ends():
    client, server = shake_hands()
    with client, server:
        yield client.sender, server.receiver


def refused(receiver, frame, kind=CUT, step=0, microbatch=0):
    with pytest.raises(SealError) as caught:
        receiver.open_tensor(frame, kind, step, microbatch)
    return caught.value.reason


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(0, 300))
def test_a_tensor_of_any_size_in_chunks_of_any_size_crosses_unchanged(chunk_bytes, size):
    client, server = shake_hands(other_terms(chunk_bytes=chunk_bytes))
    kind = TensorKind(Purpose.GRADIENT, "g", "uint8", (size,))

    for step in range(2):
        data = plain(step, size)
        frame = client.sender.seal_tensor(kind, step, 3, data)

        assert len(frame) == client.sender.frame_size(kind)
        assert server.receiver.open_tensor(frame, kind, step, 3) == data


@pytest.mark.parametrize("kind", [SCALAR, EMPTY, TensorKind(Purpose.LABEL, "y", "int64", (2, 3))])
def test_scalars_and_empty_and_typed_tensors_cross(ends, kind):
    sender, receiver = ends
    data = array.array("b", range(kind.size_bytes))

    frame = sender.seal_tensor(kind, 5, 0, memoryview(data))

    assert receiver.open_tensor(frame, kind, 5, 0) == data.tobytes()


def test_both_directions_and_all_purposes_cross_beside_each_other():
    client, server = shake_hands()
    for step, purpose in enumerate(Purpose):
        kind = TensorKind(purpose, "t", "uint8", (40,))
        up, down = plain(step, 40), plain(step + 100, 40)

        assert server.receiver.open_tensor(client.sender.seal_tensor(kind, step, 0, up), kind, step, 0) == up
        assert client.receiver.open_tensor(server.sender.seal_tensor(kind, step, 0, down), kind, step, 0) == down


def test_every_byte_of_every_frame_counts_and_nothing_is_lost(ends):
    sender, receiver = ends
    for step in range(2):
        frame = sender.seal_tensor(CUT, step, 0, plain(step))

        for position in range(len(frame)):
            for bit in (0x01, 0x80):
                altered = bytearray(frame)
                altered[position] ^= bit
                refused(receiver, altered, step=step)

        assert receiver.open_tensor(frame, CUT, step, 0) == plain(step)


def test_a_frame_cut_anywhere_is_refused_and_nothing_is_lost(ends):
    sender, receiver = ends
    frame = sender.seal_tensor(CUT, 0, 0, plain())

    reasons = {refused(receiver, frame[:size]) for size in range(len(frame))}

    assert reasons == {SealRefusal.TRUNCATED}
    assert receiver.open_tensor(frame, CUT, 0, 0) == plain()


def test_a_frame_with_something_behind_it_is_refused(ends):
    sender, receiver = ends
    frame = sender.seal_tensor(CUT, 0, 0, plain())

    assert refused(receiver, frame + b"\0") == SealRefusal.TOO_LONG
    assert refused(receiver, frame + frame) == SealRefusal.TOO_LONG
    assert receiver.open_tensor(frame, CUT, 0, 0) == plain()


def test_chunks_that_changed_places_or_were_left_out_are_refused(ends):
    sender, receiver = ends
    frame = sender.seal_tensor(CUT, 0, 0, plain())
    start, size = len(frame) - CUT.size_bytes - 3 * TAG_BYTES, TERMS.chunk_bytes + TAG_BYTES
    head, first, second, last = frame[:start], *(frame[start + i * size : start + (i + 1) * size] for i in range(3))

    assert refused(receiver, head + second + first + last) == SealRefusal.ALTERED
    assert refused(receiver, head + first + first + last) == SealRefusal.ALTERED
    assert refused(receiver, head + first + last) == SealRefusal.TRUNCATED
    assert receiver.open_tensor(frame, CUT, 0, 0) == plain()


def test_a_chunk_of_the_frame_before_it_is_refused(ends):
    sender, receiver = ends
    old, new = sender.seal_tensor(CUT, 0, 0, plain(1)), sender.seal_tensor(CUT, 1, 0, plain(2))
    receiver.open_tensor(old, CUT, 0, 0)
    tail = TERMS.chunk_bytes

    assert refused(receiver, new[:-tail] + old[-tail:], step=1) == SealRefusal.ALTERED
    assert receiver.open_tensor(new, CUT, 1, 0) == plain(2)


def test_a_replayed_frame_is_refused_and_the_next_one_still_accepted(ends):
    sender, receiver = ends
    frames = [sender.seal_tensor(CUT, step, 0, plain(step)) for step in range(3)]
    receiver.open_tensor(frames[0], CUT, 0, 0)

    assert refused(receiver, frames[0]) == SealRefusal.REPLAYED
    # and not either where the same step is asked for again
    assert refused(receiver, frames[0], step=1) == SealRefusal.REPLAYED

    assert receiver.open_tensor(frames[1], CUT, 1, 0) == plain(1)
    assert refused(receiver, frames[0], step=2) == SealRefusal.REPLAYED
    assert receiver.open_tensor(frames[2], CUT, 2, 0) == plain(2)


def test_frames_out_of_order_are_refused_and_accepted_in_order(ends):
    sender, receiver = ends
    frames = [sender.seal_tensor(CUT, step, 0, plain(step)) for step in range(3)]

    assert refused(receiver, frames[1], step=1) == SealRefusal.OUT_OF_ORDER
    assert refused(receiver, frames[2], step=2) == SealRefusal.OUT_OF_ORDER

    assert [receiver.open_tensor(frame, CUT, step, 0) for step, frame in enumerate(frames)] == [
        plain(i) for i in range(3)
    ]


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=12))
def test_whatever_order_frames_come_in_each_is_accepted_once_and_in_its_turn(order):
    client, server = shake_hands()
    frames = [client.sender.seal_tensor(CUT, step, 0, plain(step)) for step in range(5)]
    due = 0

    for index in [*order, *range(5)]:
        if index == due:
            assert server.receiver.open_tensor(frames[index], CUT, index, 0) == plain(index)
            due += 1
        else:
            reason = refused(server.receiver, frames[index], step=index)
            assert reason == (SealRefusal.REPLAYED if index < due else SealRefusal.OUT_OF_ORDER)


def test_a_frame_of_another_session_is_refused(ends):
    sender, receiver = ends
    foreign, _ = shake_hands()

    assert refused(receiver, foreign.sender.seal_tensor(CUT, 0, 0, plain())) == SealRefusal.FOREIGN_SESSION
    assert receiver.open_tensor(sender.seal_tensor(CUT, 0, 0, plain()), CUT, 0, 0) == plain()


def test_a_frame_that_is_sent_back_to_its_sender_is_refused():
    client, server = shake_hands()
    frame = client.sender.seal_tensor(CUT, 0, 0, plain())

    assert refused(client.receiver, frame) == SealRefusal.FOREIGN_DIRECTION
    assert server.receiver.open_tensor(frame, CUT, 0, 0) == plain()


def lane(epoch=1, direction=Direction.TO_SERVER, terms=TERMS, session=b"\x33" * 16, **limits):
    context = Context(terms, session)
    ciphers = derive_ciphers(b"\x44" * 32, b"\x55" * 32, context, direction, epoch)
    return DirectionState(context, direction, epoch, ciphers, **limits)


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_frame_of_an_older_or_newer_epoch_is_refused(epoch):
    receiver = Receiver(lane(2))

    assert refused(receiver, Sender(lane(epoch)).seal_tensor(CUT, 0, 0, plain())) == SealRefusal.FOREIGN_EPOCH
    assert receiver.open_tensor(Sender(lane(2)).seal_tensor(CUT, 0, 0, plain()), CUT, 0, 0) == plain()


@pytest.mark.parametrize("forged", [{"epoch": 2}, {"session": b"\x34" * 16}, {"direction": Direction.TO_CLIENT}])
def test_a_frame_whose_header_was_made_to_fit_does_not_open(forged):
    frame = Sender(lane(**forged)).seal_tensor(CUT, 0, 0, plain())
    good = Sender(lane()).seal_tensor(CUT, 0, 0, plain())
    start = len(frame) - CUT.size_bytes - 3 * TAG_BYTES

    assert refused(Receiver(lane()), good[:start] + frame[start:]) == SealRefusal.ALTERED


@pytest.mark.parametrize(
    "terms",
    [
        other_terms(run="run-2"),
        other_terms(client="client-b"),
        other_terms(config_digest=b"\x12" * 32),
        other_terms(attestation=b"\x23" * 32),
    ],
)
def test_a_frame_of_another_run_client_config_or_attestation_does_not_open(terms):
    frame = Sender(lane(terms=terms)).seal_tensor(CUT, 0, 0, plain())

    assert refused(Receiver(lane()), frame) == SealRefusal.ALTERED


@pytest.mark.parametrize(
    ("kind", "step", "microbatch"),
    [
        (CUT, 1, 0),
        (CUT, 0, 1),
        (TensorKind(Purpose.GRADIENT, "cut", "uint8", (70,)), 0, 0),
        (TensorKind(Purpose.ACTIVATION, "cup", "uint8", (70,)), 0, 0),
        (TensorKind(Purpose.ACTIVATION, "cut", "int8", (70,)), 0, 0),
        (TensorKind(Purpose.ACTIVATION, "cut", "uint8", (7, 10)), 0, 0),
        (TensorKind(Purpose.ACTIVATION, "cut", "uint8", (71,)), 0, 0),
    ],
)
def test_the_frame_of_another_tensor_than_the_one_that_is_due_is_refused(ends, kind, step, microbatch):
    sender, receiver = ends
    frame = sender.seal_tensor(CUT, 0, 0, plain())

    assert refused(receiver, frame, kind, step, microbatch) == SealRefusal.OTHER_TENSOR
    assert receiver.open_tensor(frame, CUT, 0, 0) == plain()


@given(st.binary(max_size=200))
def test_what_is_no_frame_is_refused(data):
    receiver = Receiver(lane())

    assert refused(receiver, data) in {SealRefusal.TRUNCATED, SealRefusal.MALFORMED}


def test_nothing_of_a_refused_frame_stays_in_the_buffer(ends):
    sender, receiver = ends
    frame, out = sender.seal_tensor(CUT, 0, 0, plain()), bytearray(b"x" * CUT.size_bytes)
    frame[-1] ^= 1

    with pytest.raises(SealError, match="chunk 2 of 3"):
        receiver.open_into(frame, CUT, 0, 0, out)

    assert out == bytes(CUT.size_bytes)


@pytest.mark.parametrize("size", [0, 69, 71])
def test_data_or_buffers_of_another_size_are_refused_and_change_nothing(ends, size):
    sender, receiver = ends

    with pytest.raises(SealError, match=r"malformed.*expected 70"):
        sender.seal_tensor(CUT, 0, 0, bytes(size))
    with pytest.raises(SealError, match="malformed"):
        sender.seal_into(CUT, 0, 0, plain(), bytearray(size))
    frame = sender.seal_tensor(CUT, 0, 0, plain())
    with pytest.raises(SealError, match="malformed"):
        receiver.open_into(frame, CUT, 0, 0, bytearray(size))

    assert receiver.open_tensor(frame, CUT, 0, 0) == plain()


def test_memory_with_holes_or_that_cannot_be_written_is_refused(ends):
    sender, receiver = ends
    frame = sender.seal_tensor(CUT, 0, 0, plain())

    with pytest.raises(SealError, match="contiguous"):
        sender.seal_tensor(CUT, 1, 0, memoryview(bytes(140))[::2])
    with pytest.raises(SealError, match="written"):
        sender.seal_into(CUT, 1, 0, plain(), bytes(len(frame)))
    with pytest.raises(SealError, match="malformed"):
        receiver.open_into(frame, CUT, 0, 0, bytes(70))


@pytest.mark.parametrize(("step", "microbatch"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_a_step_or_microbatch_that_does_not_fit_is_refused(ends, step, microbatch):
    with pytest.raises(SealError, match="malformed"):
        ends[0].seal_tensor(CUT, step, microbatch, plain())


@pytest.mark.parametrize(
    "changes",
    [
        {"purpose": 1},
        {"name": ""},
        {"name": "a b"},
        {"name": "é"},
        {"name": "n" * 201},
        {"dtype": "complex64"},
        {"shape": (-1,)},
        {"shape": (True,)},
        {"shape": (1,) * 9},
        {"shape": (2**30, 2**30)},
    ],
)
def test_a_tensor_that_cannot_be_described_is_refused(changes):
    good = {"purpose": Purpose.LABEL, "name": "y", "dtype": "int64", "shape": (1,)}

    with pytest.raises(SealError, match="malformed"):
        TensorKind(**good | changes)


def test_a_lane_whose_counters_are_used_up_is_refused_on_both_sides():
    sender, receiver = Sender(lane(max_chunks=7)), Receiver(lane(max_chunks=7))
    for step in range(2):
        receiver.open_tensor(sender.seal_tensor(CUT, step, 0, plain()), CUT, step, 0)

    with pytest.raises(SealError, match=r"exhausted.*6 of 7"):
        sender.seal_tensor(CUT, 2, 0, plain())

    # the one that is left suffices for one chunk
    assert receiver.open_tensor(sender.seal_tensor(SCALAR, 2, 0, b"abcd"), SCALAR, 2, 0) == b"abcd"
    with pytest.raises(SealError, match="exhausted"):
        sender.seal_tensor(SCALAR, 3, 0, b"abcd")


@pytest.mark.parametrize("epoch", [0, -1, 2**32])
def test_an_epoch_that_does_not_fit_a_nonce_is_refused(epoch):
    with pytest.raises(SealError, match="exhausted"):
        DirectionState(Context(TERMS, bytes(16)), Direction.TO_SERVER, epoch, {})


def test_a_closed_channel_seals_and_opens_nothing():
    client, server = shake_hands()
    frame = client.sender.seal_tensor(CUT, 0, 0, plain())
    client.close()
    server.close()
    server.close()

    with pytest.raises(SealError, match="closed"):
        client.sender.seal_tensor(CUT, 1, 0, plain())
    assert refused(server.receiver, frame) == SealRefusal.CLOSED


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_nothing_refers_to_a_cipher_once_its_channel_is_closed(side):
    client, _ = shake_hands()
    cipher = getattr(client, side)._direction_state.cipher_for(CUT.purpose)

    client.close()

    # the name above, and the argument of the call
    assert sys.getrefcount(cipher) == 2


def test_a_sender_that_fails_while_it_encrypts_closes():
    class Failing:
        def encrypt_into(self, *_):
            raise MemoryError

    sender = Sender(DirectionState(Context(TERMS, bytes(16)), Direction.TO_SERVER, 1, {Purpose.ACTIVATION: Failing()}))

    with pytest.raises(MemoryError):
        sender.seal_tensor(CUT, 0, 0, plain())
    with pytest.raises(SealError, match="closed"):
        sender.seal_tensor(CUT, 0, 0, plain())


def test_a_channel_is_never_copied_or_pickled(ends):
    for end in ends:
        for copier in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                copier(end)
        with pytest.raises(TypeError, match="never copied"):
            copy.copy(end._direction_state)


FORK = """
import os, sys
from sealed_pair import CUT, plain, shake_hands
from phalanx.errors import SealError
client, server = shake_hands()
frame = client.sender.seal_tensor(CUT, 0, 0, plain())
child = os.fork()
if child == 0:
    reasons = []
    seal, unseal = client.sender.seal_tensor, server.receiver.open_tensor
    for action in (lambda: seal(CUT, 1, 0, plain()), lambda: unseal(frame, CUT, 0, 0)):
        try:
            action()
        except SealError as exc:
            reasons.append(exc.reason)
    os._exit(0 if reasons == ["forked", "forked"] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
server.receiver.open_tensor(frame, CUT, 0, 0)
"""


def test_a_forked_process_does_not_use_the_counters_of_its_parent():
    done = subprocess.run([sys.executable, "-c", FORK], cwd=__file__.rpartition("/")[0], check=False)

    assert done.returncode == 0


def test_sealing_and_opening_copy_nothing_besides():
    size = 4 * 2**20
    client, server = shake_hands(other_terms(chunk_bytes=2**20))
    kind = TensorKind(Purpose.ACTIVATION, "cut", "bfloat16", (size // 2,))
    data, out, frame = bytearray(size), bytearray(size), bytearray(client.sender.frame_size(kind))
    tracemalloc.start()

    client.sender.seal_into(kind, 0, 0, data, frame)
    server.receiver.open_into(frame, kind, 0, 0, out)

    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**16


def test_no_name_of_a_channel_shows_a_key():
    client, _ = shake_hands(client_epochs=CountingEpochs())

    assert repr(client) == "Channel(sends in epoch 1, receives in epoch 1)"
    assert repr(client.sender) == "Sender(Lane(TO_SERVER, epoch 1, counter 0))"
    assert repr(client.receiver) == "Receiver(Lane(TO_CLIENT, epoch 1, counter 0))"
