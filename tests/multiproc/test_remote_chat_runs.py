"""Clients of other owners with conversations, in real processes: no text leaves one, and the bits are one process's."""

import json

import pytest
from test_remote_split_runs import REMOTE, Parties
from test_remote_split_runs import RUN as LABELLED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TASK = LABELLED[LABELLED.index("[data.labelled.task]") : LABELLED.index("[train]")]
RUN = (
    LABELLED.replace(TASK, "")
    .replace('objective = "classification"\n', "")
    .replace("steps = 120", "steps = 24")
    .replace("validate_every = 60", "validate_every = 12")
    .replace("sequence_length = 12", "sequence_length = 64\nconversations = CONVERSATIONS\nvalidation_share = SHARE")
    .replace("n_positions = 16", "n_positions = 64")
)
SHARED = '{ template = "plain", sources = [{ path = "HOME/union.jsonl" }] }'


def talk(name, number):
    asked = {"role": "user", "content": f"{name} asks {number}"}
    return {"messages": [asked, {"role": "assistant", "content": f"answer {number % 7}"}]}


class Talkers(Parties):
    """The same parties, with conversations; the union has them in turns."""

    def __init__(self, home, wire="fp32"):
        super().__init__(home)
        pairs = [[json.dumps(talk(name, n)) for name in ("north", "south")] for n in range(20)]
        (home / "union.jsonl").write_text("".join(f"{line}\n" for pair in pairs for line in pair))
        run = RUN.replace("[split]", f'[split]\nwire = "{wire}"')
        remote = (
            run.replace("REMOTE", REMOTE).replace("CONVERSATIONS", '{ template = "plain" }').replace("SHARE", "0.05")
        )
        (home / "run.toml").write_text(remote.replace("PORT", self.port).replace("HOME", str(home)))
        local = run.replace("REMOTE", "").replace("CONVERSATIONS", SHARED).replace("SHARE", "0.0")
        # of the union nothing is held out, so that each client's share is its own file
        (home / "more.txt").write_text("north asks 3 answer 4 " * 60)
        named = 'validation = [{ name = "more", sources = [{ kind = "text", path = "HOME/more.txt" }] }]'
        local = local.replace("sequence_length = 64", f"sequence_length = 64\n{named}")
        (home / "local.toml").write_text(local.replace("HOME", str(home)))

    def _write_texts(self, name):
        texts = super()._write_texts(name)
        for file, numbers in (("train", range(20)), ("test", range(100, 104))):
            lines = [json.dumps(talk(name, number)) for number in numbers]
            (self.home / name / f"{file}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return [*texts, *(f"User: {name} asks {n} Assistant: answer {n}" for n in range(20))]


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_clients_with_conversations_train_in_processes_of_their_own_what_one_process_trains(tmp_path, wire):
    parties = Talkers(tmp_path, wire)
    try:
        local = parties.train("--run-dir", "runs/local", file="local")
        assert local.wait() == 0, parties.log("owner")
        serving = [parties.enclave(), parties.client("north"), parties.client("south")]
        owner = parties.train()

        assert owner.wait() == 0, parties.log("owner") + parties.log("enclave") + parties.log("north")
        assert [one.wait() for one in serving] == [0, 0, 0]
        assert [row[:3] for row in parties.rows()] == [row[:3] for row in parties.rows("local")]
        assert parties.summary()["final_weights_digest"] == parties.summary("local")["final_weights_digest"]
        assert parties.summary()["validation_perplexity"] < parties.summary()["validation_perplexity_first"]
        assert b"asks" not in b"".join(one.read_bytes() for one in (tmp_path / "owner" / "runs" / "run").rglob("*.*"))
        assert b"north" not in (tmp_path / "south" / "train.jsonl").read_bytes()
        assert "asks" not in parties.log("enclave") + parties.log("owner")
    finally:
        parties.close()
