"""Owner, enclave and clients as processes of different owners: the bits of one process, and after a killed client."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from phalanx.data import BpeConfig
from phalanx.data.tokenizers import train_bpe
from phalanx.security.crypto import create_authority, issue_certificate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RUN = """
[model]
from_scratch = true

[model.architecture]
model_type = "gpt2"
vocab_size = 300
n_positions = 16
n_embd = 32
n_layer = 3
n_head = 4

[model.adapter]
rank = 4

[data]
tokenizer = { kind = "file", path = "HOME/tokenizer.json" }
sequence_length = 12

[data.labelled.task]
classes = ["flu", "cold"]
text = "note"
label = "diagnosis"
FILES

[train]
objective = "classification"
steps = 120
batch_size = 8
microbatches = 4
validate_every = 60

[optimizer]
lr = 1e-2

[split]
cut = 2
clients = 2
allow_insecure_sim = true
step_timeout_s = 240.0
REMOTE

[split.transport]
timeout_s = 20.0

[checkpoint]
every = 10
"""
REMOTE = 'remote_clients = ["north", "south"]\nremote_enclave = "localhost:PORT"\npki = "HOME/keys"\n'
FILES = """
train = ["HOME/north/train.jsonl", "HOME/south/train.jsonl"]
test = ["HOME/north/test.jsonl", "HOME/south/test.jsonl"]
"""


class Parties:
    """The directories and processes of all parties.

    Args:
        home: Has a directory of each.
        certified: Whether all have certificates, or the owner alone.
        clients: Names of the clients.
        changes: Of the remote run file, old text by new.
    """

    def __init__(self, home, *, certified=True, clients=("north", "south"), changes=None):
        self.home, self.processes = home, []
        create_authority(home / "keys")
        for name in ("owner", "enclave", *clients) if certified else ("owner",):
            issue_certificate(home / "keys", name)
        for name in ("owner", "enclave", *clients):
            (home / name).mkdir()
        texts = [text for name in clients for text in self._write_texts(name)]
        (home / "tokenizer.json").write_bytes(train_bpe(iter(texts), BpeConfig(vocab_size=270)).to_json())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = port = str(probe.getsockname()[1])
        run = RUN.replace("FILES", "").replace("REMOTE", REMOTE).replace("PORT", port).replace("HOME", str(home))
        for old, new in (changes or {}).items():
            assert old in run, old
            run = run.replace(old, new)
        (home / "run.toml").write_text(run)
        (home / "local.toml").write_text(RUN.replace("FILES", FILES).replace("REMOTE", "").replace("HOME", str(home)))

    def _write_texts(self, name):
        texts = []
        for file, count in (("train", 20 if name == "north" else 14), ("test", 9)):
            rows = [
                {"note": f"{kind} {kind} of {name} {file} {n}", "diagnosis": kind}
                for n in range(count)
                for kind in [("flu", "cold")[n % 2]]
            ]
            (self.home / name / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            texts += [row["note"] for row in rows]
        (self.home / name / "client.toml").write_text(
            f'run = "{self.home}/run.toml"\nidentity = "{self.home}/keys/{name}"\ntrain = "train.jsonl"\n'
            'test = "test.jsonl"\nallow_insecure_sim = true\ndirectory = "state"\n'
        )
        return texts

    def start(self, party, *arguments, program=("-m", "phalanx"), **variables):
        with (self.home / party / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                cwd=self.home / party,
                env={**os.environ, "PHALANX_CACHE": str(self.home / "cache"), **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def client(self, name):
        return self.start(name, "client", "client.toml")

    def say(self, name, line):
        """Add a line to a client's file."""
        with (self.home / name / "client.toml").open("a") as file:
            file.write(f"{line}\n")

    def end(self, *processes):
        """Wait for the owner and the processes that end with it; returns their exit codes."""
        return [process.wait() for process in processes]

    def events(self, *kinds, run="run"):
        lines = (self.home / "owner" / "runs" / run / "events.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [(one["kind"], one["body"]) for one in found if one["kind"] in kinds]

    def enclave(self):
        keys = str(self.home / "keys" / "enclave")
        return self.start("enclave", "enclave", "serve", str(self.home / "run.toml"), "--identity", keys)

    def train(self, *arguments, file="run"):
        return self.start("owner", "train", str(self.home / f"{file}.toml"), *arguments)

    def log(self, party):
        return (self.home / party / "log.txt").read_text()

    def summary(self, run="run"):
        return json.loads((self.home / "owner" / "runs" / run / "summary.json").read_text())

    def rows(self, run="run"):
        lines = (self.home / "owner" / "runs" / run / "metrics.jsonl").read_text().splitlines()
        keys = ("step", "loss", "grad_norm", "validation_loss", "validation_accuracy", "validation_macro_f1")
        return [tuple(json.loads(line).get(key) for key in keys) for line in lines]

    def wait_for(self, process, has_come):
        while not has_come():
            assert process.poll() is None, self.log("owner")
            time.sleep(0.1)

    def close(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def parties(tmp_path):
    made = Parties(tmp_path)
    yield made
    made.close()


def test_a_client_that_is_killed_ends_the_run_with_exit_code_4_and_a_resumed_one_has_the_bits_of_one_process(parties):
    local = parties.train("--run-dir", "runs/local", file="local")
    assert local.wait() == 0, parties.log("owner")
    enclave, north, south = parties.enclave(), parties.client("north"), parties.client("south")
    owner = parties.train()
    metrics = parties.home / "owner" / "runs" / "run" / "metrics.jsonl"
    parties.wait_for(owner, lambda: metrics.exists() and '"step": 12,' in metrics.read_text())
    south.send_signal(signal.SIGKILL)
    south.wait()

    assert owner.wait() == 4, parties.log("owner")
    assert "south" in parties.log("owner")
    assert (enclave.poll(), north.poll()) == (None, None)

    south = parties.client("south")
    again = parties.train("--resume")

    assert again.wait() == 0, parties.log("owner")
    assert [one.wait() for one in (enclave, north, south)] == [0, 0, 0]
    assert parties.rows() == parties.rows("local")
    assert parties.summary()["final_weights_digest"] == parties.summary("local")["final_weights_digest"]
    assert parties.summary()["resumed_from"] >= 10
    held = b"".join(
        path.read_bytes() for path in (parties.home / "owner" / "runs" / "run").rglob("*") if path.is_file()
    )
    assert b"flu flu of" not in held and b"flu flu of" not in parties.log("enclave").encode()


def test_an_enclave_and_two_clients_join_by_one_command_each_and_train_to_the_end(tmp_path):
    with contextlib.closing(Parties(tmp_path, certified=False)) as parties:
        names = ("enclave", "north", "south")
        chosen = [word for name in names for word in ("--name", name)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = ("--host", "127.0.0.1", "--port", str(probe.getsockname()[1]))
        inviting = parties.start("owner", "invite", str(tmp_path / "run.toml"), *chosen, *where)
        parties.wait_for(inviting, lambda: "waiting for all to join" in parties.log("owner"))
        tokens = dict(zip(names, re.findall(r"phalanx join (\S+)", parties.log("owner")), strict=True))
        texts = ("--train", "train.jsonl", "--test", "test.jsonl", "--allow-insecure-sim")

        serving = [
            parties.start(name, "join", tokens[name], "--dir", "keys", *(() if name == "enclave" else texts))
            for name in names
        ]
        assert inviting.wait() == 0, parties.log("owner")
        owner = parties.train()

        assert owner.wait() == 0, parties.log("owner") + parties.log("enclave") + parties.log("north")
        assert [one.wait() for one in serving] == [0, 0, 0]
        assert parties.summary()["status"] == "completed"
        assert not list((tmp_path / "keys").glob("[ens]*o*th/*.key"))


def test_the_parties_of_a_split_take_part_in_a_second_run_of_their_owner_by_one_command_each(tmp_path):
    short = {"steps = 120": "steps = 8", "validate_every = 60": "validate_every = 4", "every = 10": "every = 4"}
    names = ("enclave", "north", "south")
    chosen = [word for name in names for word in ("--name", name)]
    texts = ("--train", "train.jsonl", "--test", "test.jsonl", "--allow-insecure-sim")

    with contextlib.closing(Parties(tmp_path, certified=False, changes=short)) as parties:

        def take_part(run):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                where = ("--host", "127.0.0.1", "--port", str(probe.getsockname()[1]))
            before = len(parties.log("owner")) if (tmp_path / "owner" / "log.txt").exists() else 0
            inviting = parties.start("owner", "invite", str(tmp_path / "run.toml"), *chosen, *where)
            parties.wait_for(inviting, lambda: "waiting for all to join" in parties.log("owner")[before:])
            tokens = re.findall(r"phalanx join (\S+)", parties.log("owner")[before:])
            serving = [
                parties.start(name, "join", token, "--dir", "keys", *(() if name == "enclave" else texts))
                for name, token in zip(names, tokens, strict=True)
            ]
            assert inviting.wait() == 0, parties.log("owner")
            owner = parties.train("--run-dir", f"runs/{run}")
            logs = "".join(map(parties.log, ("owner", *names)))
            assert owner.wait() == 0, logs
            assert [process.wait() for process in serving] == [0, 0, 0], logs

        take_part("first")
        (tmp_path / "run.toml").write_text((tmp_path / "run.toml").read_text().replace("lr = 1e-2", "lr = 2e-2"))
        take_part("second")

        summaries = [parties.summary(run) for run in ("first", "second")]
        assert [summary["status"] for summary in summaries] == ["completed", "completed"]
        assert summaries[0]["final_weights_digest"] != summaries[1]["final_weights_digest"]
        for name in names:
            assert (tmp_path / name / "keys" / "run.toml").read_bytes() == (tmp_path / "run.toml").read_bytes()
            assert "lr = 1e-2" in (tmp_path / name / "keys" / "run-1.toml").read_text()
