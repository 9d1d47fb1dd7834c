"""Where ranks meet: each start by a file of its own, never by a store of dead ranks; a rank too many stands by."""

import pytest
import torch
from torch import distributed as dist

from phalanx.errors import ConfigError, PeerLostError
from phalanx.parallel import RankEnv, find_place, join_ranks, stand_by
from phalanx.parallel.control.local_ranks import LocalRanks
from phalanx.parallel.control.rank0 import _lost_connection

PLACE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_each_start_of_torchrun_meets_by_a_file_of_its_own(tmp_path):
    meetings = {**PLACE, "PHALANX_MEETINGS": str(tmp_path)}

    first = find_place({**meetings, "TORCHELASTIC_RESTART_COUNT": "0"})
    second = find_place({**meetings, "TORCHELASTIC_RESTART_COUNT": "1"})

    assert first.rendezvous.parent == tmp_path
    assert first.rendezvous != second.rendezvous


def test_a_place_is_read_as_it_was_written(tmp_path):
    place = RankEnv(1, 4, 1, 4, tmp_path / "meeting", is_kept=True)

    assert find_place(place.to_environment()) == place


@pytest.mark.parametrize(("local_world", "expected"), [(4, (2, 2, True)), (2, (2, 2, False))])
def test_the_ranks_that_train_are_the_first_ones(local_world, expected):
    place = RankEnv(1, 4, 1, local_world)

    found = place.with_world(2)

    assert (found.world, found.local_world, place.is_on_one_machine) == expected


def test_who_is_left_over_stands_by_until_the_run_is_over(tmp_path):
    meeting = tmp_path / "meeting"

    with join_ranks(RankEnv(0, 1, 0, 1, meeting), torch.device("cpu"), "00" * 32):
        store = dist.FileStore(str(meeting), 1)
        assert not store.check(["phalanx/over"])

    stand_by(RankEnv(1, 1, 1, 1, meeting))


def test_a_store_that_outlives_the_dead_is_refused(monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")

    with (
        pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or use `phalanx launch`"),
        join_ranks(RankEnv(0, 1, 0, 1), torch.device("cpu"), "00" * 32),
    ):
        pass


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:33"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
    ],
)
def test_a_broken_connection_is_told_from_a_bug(error, is_loss):
    found = _lost_connection(error)

    assert isinstance(found, PeerLostError) is is_loss


def test_ranks_of_a_later_session_meet_in_a_file_of_their_own(tmp_path):
    """A store that is freed late reads its file from where it stood, and never ends in a file of other words."""
    first, second = (LocalRanks(tmp_path, ("none",), 1, 1) for _ in range(2))
    earlier = dist.FileStore(str(first.place_of(0).rendezvous), 1)
    earlier.set("a", "b" * 999)
    second.start_ranks()
    later = dist.FileStore(str(second.place_of(0).rendezvous), 1)
    later.set("c", bytes(range(256)) * 40)

    del earlier
    second.close()

    assert later.get("c") == bytes(range(256)) * 40
    assert first.place_of(0).rendezvous != second.place_of(0).rendezvous
