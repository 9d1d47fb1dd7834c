import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import CheckpointError, RollbackError
from phalanx.security.seal import BlobPlace, BlobSealer, NotRollbackProofCounter

KEY, OTHER_KEY = b"\x01" * 32, b"\x02" * 32
PLACE = BlobPlace("run-1", "adapters", 10)
STATE = bytes(range(256)) * 2


class ProofCounter:
    rollback_proof = True

    def __init__(self):
        self.count = 0

    def read_count(self):
        return self.count

    def increment(self):
        self.count += 1
        return self.count


@pytest.fixture
def counter():
    return ProofCounter()


@pytest.fixture
def sealer(counter):
    return BlobSealer(KEY, counter)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([0, 1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20]))
def test_a_state_of_any_size_comes_back_unchanged(size):
    sealer, data = BlobSealer(KEY, ProofCounter()), b"s" * size

    blob = sealer.seal_blob(PLACE, data)

    assert sealer.open_blob(PLACE, blob) == data
    # one byte or two are in any random bytes
    assert size < 64 or data[:64] not in blob


def test_only_the_newest_state_opens(sealer):
    old = sealer.seal_blob(PLACE, b"old")
    new = sealer.seal_blob(PLACE, b"new")

    with pytest.raises(RollbackError, match="number 1, the newest is 2"):
        sealer.open_blob(PLACE, old)
    assert sealer.open_blob(PLACE, new) == b"new"


def test_an_older_state_opens_where_a_person_says_so_and_no_further_back(sealer, caplog):
    blobs = [sealer.seal_blob(PLACE, data) for data in (b"oldest", b"old", b"new")]

    assert sealer.open_blob(PLACE, blobs[1], unsafe_accept_behind=1) == b"old"
    assert "number 2 is used although 3 was the newest" in caplog.text
    with pytest.raises(RollbackError):
        sealer.open_blob(PLACE, blobs[0], unsafe_accept_behind=1)
    with pytest.raises(RollbackError):
        sealer.open_blob(PLACE, blobs[2], unsafe_accept_behind=-1)


def test_a_crash_before_the_newest_state_was_safe_is_not_taken_for_nothing(sealer, counter):
    kept = sealer.seal_blob(PLACE, b"kept")
    counter.increment()

    with pytest.raises(RollbackError, match="or a crash lost the newest"):
        sealer.open_blob(PLACE, kept)


def test_a_counter_that_went_back_is_refused(sealer, counter):
    blob = sealer.seal_blob(PLACE, STATE)
    counter.count = 0

    with pytest.raises(RollbackError, match="counter went back"):
        sealer.open_blob(PLACE, blob)


def test_two_processes_at_once_never_make_two_newest_states(counter):
    one, other = BlobSealer(KEY, counter), BlobSealer(KEY, counter)
    blobs = [one.seal_blob(PLACE, b"one"), other.seal_blob(PLACE, b"other"), one.seal_blob(PLACE, b"one more")]

    opened = []
    for blob in blobs:
        try:
            opened.append(bytes(one.open_blob(PLACE, blob)))
        except RollbackError:
            continue

    assert opened == [b"one more"]


def test_a_state_outlives_the_process(tmp_path):
    blob = BlobSealer(KEY, NotRollbackProofCounter(tmp_path / "count")).seal_blob(PLACE, STATE)

    assert BlobSealer(KEY, NotRollbackProofCounter(tmp_path / "count")).open_blob(PLACE, blob) == STATE


def test_every_byte_of_a_blob_counts(sealer):
    blob = sealer.seal_blob(PLACE, STATE)

    for position in range(len(blob)):
        altered = bytearray(blob)
        altered[position] ^= 0x01
        with pytest.raises(CheckpointError):
            sealer.open_blob(PLACE, altered)

    assert sealer.open_blob(PLACE, blob) == STATE


def test_a_blob_cut_anywhere_or_made_longer_is_refused(sealer):
    blob = sealer.seal_blob(PLACE, STATE)

    for size in range(len(blob)):
        with pytest.raises(CheckpointError):
            sealer.open_blob(PLACE, blob[:size])
    with pytest.raises(CheckpointError, match="longer"):
        sealer.open_blob(PLACE, blob + b"\0")


def test_chunks_of_a_blob_that_changed_places_are_refused(sealer):
    size = 2**20 + 16
    blob = sealer.seal_blob(PLACE, bytes(2 * 2**20))
    start = len(blob) - 2 * size
    head, first, second = blob[:start], blob[start : start + size], blob[start + size :]

    with pytest.raises(CheckpointError, match="chunk 0 of 2"):
        sealer.open_blob(PLACE, head + second + first)


@pytest.mark.parametrize(
    "place",
    [BlobPlace("run-2", "adapters", 10), BlobPlace("run-1", "optimizer", 10), BlobPlace("run-1", "adapters", 11)],
)
def test_a_blob_opens_in_its_own_place_only(sealer, place):
    with pytest.raises(CheckpointError, match="from another run, name or step"):
        sealer.open_blob(place, sealer.seal_blob(PLACE, STATE))


def test_another_measurements_key_opens_nothing(sealer, counter):
    with pytest.raises(CheckpointError, match="another measurement"):
        BlobSealer(OTHER_KEY, counter).open_blob(PLACE, sealer.seal_blob(PLACE, STATE))


def test_the_same_state_is_sealed_differently_each_time(sealer, counter):
    first = sealer.seal_blob(PLACE, STATE)
    counter.count = 0

    assert first[-len(STATE) :] != sealer.seal_blob(PLACE, STATE)[-len(STATE) :]


def test_a_closed_sealer_seals_and_opens_nothing(sealer):
    blob = sealer.seal_blob(PLACE, STATE)
    sealer.close()
    sealer.close()

    with pytest.raises(CheckpointError, match="closed"):
        sealer.seal_blob(PLACE, STATE)
    with pytest.raises(CheckpointError, match="closed"):
        sealer.open_blob(PLACE, blob)


def test_a_key_of_another_length_is_refused(counter):
    with pytest.raises(CheckpointError, match="32"):
        BlobSealer(b"short", counter)


def test_no_name_of_a_sealer_shows_the_key(sealer):
    assert repr(sealer) == "BlobSealer(...)"
