"""States that are written over after every update: killed at any moment, one of the two is whole."""

import os

import pytest
import torch

from phalanx.checkpoint.state_files import StateFiles, read_state, state_path
from phalanx.errors import CheckpointError


def state(value):
    return {
        "weight/a": torch.full((3, 5), float(value)),
        "exp_avg/a": torch.full((3, 5), -float(value)),
        "weight/b": torch.arange(7) + value,
        "weight/empty": torch.zeros(0, 4),
    }


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def refusals():
    return []


@pytest.fixture
def files(tmp_path, refusals):
    files = StateFiles(tmp_path, "worker-1", refusals.append)
    yield files
    files.close()


def test_the_last_two_states_can_be_read(files, tmp_path):
    for step in range(5):
        files.keep_state(1, step, state(step))

    for step in (3, 4):
        assert equal(read_state(state_path(tmp_path, 1, "worker-1", step), step), state(step))
    with pytest.raises(CheckpointError, match="is of step 4, expected the state of step 2"):
        read_state(state_path(tmp_path, 1, "worker-1", 2), 2)


def test_stages_and_parties_have_files_of_their_own(files, tmp_path):
    other = StateFiles(tmp_path, "worker-2", print)
    files.keep_state(1, 0, state(1))
    files.keep_state(2, 0, state(2))
    other.keep_state(1, 0, state(3))
    other.close()

    found = [
        read_state(state_path(tmp_path, s, p, 0), 0) for s, p in ((1, "worker-1"), (2, "worker-1"), (1, "worker-2"))
    ]

    assert [int(tensors["weight/b"][0]) for tensors in found] == [1, 2, 3]


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_a_process_that_dies_while_it_writes_leaves_the_state_before(files, tmp_path, monkeypatch, written):
    files.keep_state(1, 0, state(0))
    files.keep_state(1, 1, state(1))
    left, honest = [written], os.pwrite

    def die(handle, data, offset):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return honest(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", die)
    with pytest.raises(KeyboardInterrupt):
        files.keep_state(1, 2, state(2))

    assert equal(read_state(state_path(tmp_path, 1, "worker-1", 1), 1), state(1))
    with pytest.raises(CheckpointError, match="was being written" if written else "is of step 0"):
        read_state(state_path(tmp_path, 1, "worker-1", 2), 2)


def test_writes_that_come_in_crumbs_are_completed(files, tmp_path, monkeypatch):
    honest = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: honest(handle, data[:5], offset))

    files.keep_state(1, 0, state(9))

    assert equal(read_state(state_path(tmp_path, 1, "worker-1", 0), 0), state(9))


def test_a_disk_that_refuses_is_said_once_and_nothing_is_kept_any_more(files, tmp_path, monkeypatch, refusals):
    files.keep_state(1, 0, state(0))

    def full(handle, data, offset):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        files.keep_state(1, 1, state(1))
    files.keep_state(1, 2, state(2))

    assert len(refusals) == 1
    assert "No space left" in refusals[0]
    with pytest.raises(CheckpointError):
        read_state(state_path(tmp_path, 1, "worker-1", 2), 2)


def test_a_disk_that_is_too_small_for_a_state_is_left_as_it_was(files, tmp_path, monkeypatch, refusals):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "replace", full)
    files.keep_state(1, 0, state(0))

    assert len(refusals) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_said(tmp_path, refusals):
    (tmp_path / "file").write_text("")

    StateFiles(tmp_path / "file" / "journal", "worker-1", refusals.append).keep_state(1, 0, state(0))

    assert len(refusals) == 1


@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: os.truncate(path, 40)])
def test_a_file_that_is_missing_or_cut_off_is_refused_by_name(files, tmp_path, spoil):
    files.keep_state(1, 0, state(0))
    path = state_path(tmp_path, 1, "worker-1", 0)
    spoil(path)

    with pytest.raises(CheckpointError, match=r"stage-1\.worker-1\.0\.safetensors: cannot be read"):
        read_state(path, 0)
