"""Clients and a masked worker of other owners: each joins by one command, and the bits are those of one machine."""

import contextlib
import re
import signal
import socket

import pytest
from test_remote_split_runs import Parties

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NAMES = ("enclave", "north", "south", "masked-0")
SHORT = {"steps = 120": "steps = 24", "validate_every = 60": "validate_every = 12", "every = 10": "every = 4"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def parties(tmp_path):
    """All parties with their files; the masked worker has a directory too."""
    masked = f'[split.masked]\naddress = "localhost:{free_port()}"\n\n[split.transport]'
    changes = {**SHORT, "[split]": '[split]\nmode = "masked"', "[split.transport]": masked}
    with contextlib.closing(Parties(tmp_path, certified=False, changes=changes)) as made:
        (tmp_path / "masked-0").mkdir()
        local = (tmp_path / "local.toml").read_text()
        for old, new in {**SHORT, "[split]": '[split]\nmode = "masked"'}.items():
            local = local.replace(old, new)
        (tmp_path / "local.toml").write_text(local)
        yield made


def join_all(parties):
    """Invite everybody; return the processes that have joined, by name, and how each begins again."""
    where = ("--host", "127.0.0.1", "--port", free_port())
    chosen = [word for name in NAMES for word in ("--name", name)]
    inviting = parties.start("owner", "invite", str(parties.home / "run.toml"), *chosen, *where)
    parties.wait_for(inviting, lambda: "waiting for all to join" in parties.log("owner"))
    tokens = re.findall(r"phalanx join (\S+)", parties.log("owner"))
    texts = ("--train", "train.jsonl", "--test", "test.jsonl", "--allow-insecure-sim")
    options = {"enclave": (), "masked-0": ("--masked", "--advertise", "127.0.0.1", "--port", free_port())}
    words = {
        name: ("join", token, "--dir", "keys", *options.get(name, texts))
        for name, token in zip(NAMES, tokens, strict=True)
    }
    joined = {name: parties.start(name, *its) for name, its in words.items()}
    assert inviting.wait() == 0, parties.log("owner")
    return joined, words


def logs(parties):
    return "".join(map(parties.log, ("owner", *NAMES)))


def test_a_masked_worker_joins_by_invitation_and_the_bits_are_those_of_one_machine(parties):
    local = parties.train("--run-dir", "runs/local", file="local")
    assert local.wait() == 0, parties.log("owner")
    joined, _ = join_all(parties)

    owner = parties.train()

    assert owner.wait() == 0, logs(parties)
    assert [process.wait() for process in joined.values()] == [0, 0, 0, 0], logs(parties)
    assert parties.rows() == parties.rows("local")
    assert parties.summary()["final_weights_digest"] == parties.summary("local")["final_weights_digest"]
    assert "multiply masked numbers" in parties.log("masked-0")
    # the worker has seen no text, and nobody has the run's keys beside their owners
    assert "flu" not in parties.log("masked-0")
    assert not list((parties.home / "keys").glob("masked*/*.key"))


def test_a_killed_masked_worker_ends_the_session_and_the_same_commands_go_on(parties):
    joined, words = join_all(parties)
    owner = parties.train()
    metrics = parties.home / "owner" / "runs" / "run" / "metrics.jsonl"
    parties.wait_for(owner, lambda: metrics.exists() and '"step": 8,' in metrics.read_text())
    joined["masked-0"].send_signal(signal.SIGKILL)
    joined["masked-0"].wait()

    assert owner.wait() == 4, logs(parties)
    assert [joined[name].poll() for name in ("enclave", "north", "south")] == [None, None, None], logs(parties)
    joined["masked-0"] = parties.start("masked-0", *words["masked-0"])
    again = parties.train("--resume")

    assert again.wait() == 0, logs(parties)
    assert [process.wait() for process in joined.values()] == [0, 0, 0, 0], logs(parties)
    assert parties.summary()["resumed_from"] >= 4
