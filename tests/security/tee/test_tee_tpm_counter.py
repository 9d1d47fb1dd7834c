"""A counter in a TPM: what turns back and what does not, a software TPM's host included."""

import pytest

from phalanx.errors import RollbackError
from phalanx.security.seal import BlobPlace, BlobSealer, EpochStore
from phalanx.security.tee import TpmCounter

INDEX = 0x01800010
PLACE = BlobPlace("run", "adapters", 1)


def test_it_goes_up_by_one_and_survives_a_restart(bare_tpm):
    with bare_tpm.open() as device:
        counter = TpmCounter.create_counter(device, INDEX)
        first = counter.read_count()
        assert [counter.increment() for _ in range(3)] == [first + 1, first + 2, first + 3]

    bare_tpm.restart()

    with bare_tpm.open() as device:
        assert TpmCounter(device, INDEX).read_count() == first + 3


def test_a_counter_is_made_once(device):
    TpmCounter.create_counter(device, INDEX)

    with pytest.raises(RollbackError, match="lie there already"):
        TpmCounter.create_counter(device, INDEX)


def test_a_counter_that_is_not_there_is_not_a_new_one(device):
    with pytest.raises(RollbackError, match="created once"):
        TpmCounter(device, INDEX)


def test_a_counter_that_was_deleted_and_made_again_begins_higher(device):
    from phalanx.security.tee.tpm import wire

    counter = TpmCounter.create_counter(device, INDEX)
    highest = [counter.increment() for _ in range(5)][-1]
    # TPM2_NV_UndefineSpace, which its owner may
    undefine = wire.encode_command(0x122, (wire.OWNER, INDEX), (wire.password_authorisation(),), b"")
    assert device._link.exchange_command(undefine)[6:10] == bytes(4)

    assert TpmCounter.create_counter(device, INDEX).read_count() > highest


def test_memory_that_is_no_counter_is_refused(device):
    import struct

    from phalanx.security.tee.tpm import wire
    from phalanx.security.tee.tpm.wire import TpmCommand

    plain = struct.pack(">IHI", INDEX, wire.SHA256, 0x02060006) + wire.size_prefixed(b"") + struct.pack(">H", 8)
    device.send_command(
        TpmCommand.NV_DEFINE_SPACE,
        (wire.OWNER,),
        wire.size_prefixed(b"") + wire.size_prefixed(plain),
        wire.password_authorisation(),
    )

    with pytest.raises(RollbackError, match="something else lies there"):
        TpmCounter(device, INDEX)


def test_somebody_else_who_raises_it_at_the_same_time_is_found(device):
    counter = TpmCounter.create_counter(device, INDEX)
    other, read = TpmCounter(device, INDEX), counter.read_count

    def interrupted() -> int:
        value, counter.read_count = read(), read
        other.increment()
        return value

    counter.read_count = interrupted

    with pytest.raises(RollbackError, match="somebody else"):
        counter.increment()


def test_a_software_tpm_says_that_its_host_can_turn_it_back(device):
    assert not TpmCounter.create_counter(device, INDEX).rollback_proof


def prepared(device, folder):
    """A party's epochs and a sealed state, each on a counter of its own."""
    epochs, blobs = TpmCounter.create_counter(device, INDEX), TpmCounter.create_counter(device, INDEX + 1)
    EpochStore.create(folder / "epoch", epochs).raise_epoch()
    return BlobSealer(b"k" * 32, blobs).seal_blob(PLACE, b"older")


def test_a_host_that_turns_back_a_software_tpm_is_caught_by_what_lies_beside_it(bare_tpm, tmp_path):
    with bare_tpm.open() as device:
        prepared(device, tmp_path)
    copy = bare_tpm.snapshot()
    with bare_tpm.open() as device:
        EpochStore(tmp_path / "epoch", TpmCounter(device, INDEX)).raise_epoch()
        EpochStore(tmp_path / "epoch", TpmCounter(device, INDEX)).raise_epoch()
        newer = BlobSealer(b"k" * 32, TpmCounter(device, INDEX + 1)).seal_blob(PLACE, b"newer")

    bare_tpm.put_back(copy)

    with bare_tpm.open() as device:
        with pytest.raises(RollbackError, match="the counter was turned back"):
            EpochStore(tmp_path / "epoch", TpmCounter(device, INDEX)).raise_epoch()
        with pytest.raises(RollbackError, match="the counter went back"):
            BlobSealer(b"k" * 32, TpmCounter(device, INDEX + 1)).open_blob(PLACE, newer)


def test_a_host_that_turns_back_a_software_tpm_and_all_files_with_it_wins(bare_tpm, tmp_path):
    """What a software TPM does not stop, and why its tier says so; a chip's memory cannot be copied back."""
    with bare_tpm.open() as device:
        older = prepared(device, tmp_path)
        epoch = (tmp_path / "epoch").read_bytes()
    copy = bare_tpm.snapshot()
    with bare_tpm.open() as device:
        taken = EpochStore(tmp_path / "epoch", TpmCounter(device, INDEX)).raise_epoch()
        BlobSealer(b"k" * 32, TpmCounter(device, INDEX + 1)).seal_blob(PLACE, b"newer")

    bare_tpm.put_back(copy)
    (tmp_path / "epoch").write_bytes(epoch)

    with bare_tpm.open() as device:
        assert EpochStore(tmp_path / "epoch", TpmCounter(device, INDEX)).raise_epoch() == taken
        assert BlobSealer(b"k" * 32, TpmCounter(device, INDEX + 1)).open_blob(PLACE, older) == b"older"
