"""Sealed states: a crash at any moment costs no kept one, and no enclave goes back behind the newest kept one."""

import pytest
import torch

from phalanx.errors import CheckpointError, RollbackError
from phalanx.security.seal import NotRollbackProofCounter
from phalanx.split.hardware.state import StateKeeper

KEY = b"\x05" * 32


@pytest.fixture
def reopen(tmp_path):
    """What an enclave finds when it is started again."""

    def open_(key=KEY, run="run"):
        counters = (NotRollbackProofCounter(tmp_path / name) for name in ("sealed", "settled"))
        return StateKeeper(key, run, *counters)

    return open_


def state(value):
    return {"weight/a": torch.full((3,), float(value)), "exp_avg/a": torch.zeros(3)}


def value_in(keeper, blob, step):
    tensors, books = keeper.open_state(blob, step)
    assert books == {"gate": step}
    return tensors["weight/a"][0].item()


def seal(keeper, value, step):
    return keeper.seal_state(state(value), {"gate": step}, step)


def test_a_state_comes_back_as_it_was(reopen):
    blob, number = seal(reopen(), 4, step=2)

    assert number == 1
    assert value_in(reopen(), blob, 2) == 4
    assert b"weight/a" not in bytes(blob)


def test_what_was_kept_is_found_again_however_many_later_ones_were_lost(reopen):
    kept, number = seal(reopen(), 1, step=2)
    reopen().settle_state(number)

    for attempt in range(3):
        # sealed, and the machine dies before anybody has it
        seal(reopen(), 10 + attempt, step=4)
        assert value_in(reopen(), kept, 2) == 1


def test_once_a_newer_one_is_kept_every_older_one_is_void(reopen):
    keeper = reopen()
    first, number = seal(keeper, 1, step=2)
    keeper.settle_state(number)
    lost, _ = seal(keeper, 2, step=4)
    newest, number = seal(reopen(), 3, step=4)
    reopen().settle_state(number)

    assert value_in(reopen(), newest, 4) == 3
    for blob, step in ((first, 2), (lost, 4)):
        with pytest.raises(RollbackError, match="an older state was put back"):
            reopen().open_state(blob, step)


def test_a_crash_between_keeping_and_settling_leaves_both_usable_and_the_next_one_decides(reopen):
    keeper = reopen()
    first, number = seal(keeper, 1, step=2)
    keeper.settle_state(number)
    second, _ = seal(keeper, 2, step=4)

    # the newest checkpoint on the disk is the second one, the enclave does not know that it is kept
    assert value_in(reopen(), second, 4) == 2
    third, number = seal(reopen(), 3, step=6)
    reopen().settle_state(number)

    assert value_in(reopen(), third, 6) == 3
    for blob, step in ((first, 2), (second, 4)):
        with pytest.raises(RollbackError):
            reopen().open_state(blob, step)


def test_settling_twice_or_late_changes_nothing_and_what_was_never_sealed_cannot_be(reopen):
    keeper = reopen()
    _, first = seal(keeper, 1, step=2)
    blob, second = seal(keeper, 2, step=4)

    for number in (second, second, first):
        keeper.settle_state(number)

    assert value_in(reopen(), blob, 4) == 2
    with pytest.raises(CheckpointError, match="was never sealed"):
        keeper.settle_state(3)


def test_no_byte_of_a_state_can_be_altered(reopen):
    blob, _ = seal(reopen(), 1, step=2)

    for position in range(0, len(blob), 7):
        altered = bytearray(blob)
        altered[position] ^= 1
        with pytest.raises((CheckpointError, RollbackError)):
            reopen().open_state(altered, 2)

    assert value_in(reopen(), blob, 2) == 1


@pytest.mark.parametrize("given", [{"key": b"\x06" * 32}, {"run": "other"}])
def test_a_state_opens_in_its_own_enclave_and_run_only(reopen, given):
    blob, _ = seal(reopen(), 1, step=2)

    with pytest.raises(CheckpointError):
        reopen(**given).open_state(blob, 2)
    with pytest.raises(CheckpointError):
        reopen().open_state(blob, 3)


def test_an_enclave_knows_that_it_has_something_to_go_on_from(reopen):
    assert not reopen().has_kept
    _, number = seal(reopen(), 1, step=2)
    assert not reopen().has_kept

    reopen().settle_state(number)

    assert reopen().has_kept
    assert not reopen().rollback_proof
