"""Remote clients with preferences, in real processes: no answer leaves one, and the steps are one process's."""

import json
import signal

import pytest
from test_remote_split_runs import REMOTE, Parties
from test_remote_split_runs import RUN as LABELLED

from phalanx.data.preferences import pairs
from phalanx.data.preferences.preference import parse_preference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TASK = LABELLED[LABELLED.index("[data.labelled.task]") : LABELLED.index("[train]")]
RUN = (
    LABELLED.replace(TASK, "")
    .replace('objective = "classification"', 'objective = { kind = "dpo", beta = 0.5 }')
    .replace("steps = 120", "steps = 24")
    .replace("validate_every = 60", "validate_every = 12")
    .replace("sequence_length = 12", "sequence_length = 32\npreferences = PREFERENCES\nvalidation_share = SHARE")
    .replace("n_positions = 16", "n_positions = 32")
)


def pair(name, number):
    return {"prompt": f"{name} asks {number}:", "chosen": f" yes {number % 7}", "rejected": f" no {number % 5}"}


def trained_pairs():
    """The pairs of the union that a run on it trains on, in its order; each client has every second one."""
    union = [pair(name, n) for n in range(24) for name in ("north", "south")]
    return union, [one for one in union if not pairs._is_held_out(parse_preference(one, "pairs", ()), 0, 0.1)]


def as_lines(preferences):
    return "".join(f"{json.dumps(one)}\n" for one in preferences)


class Choosers(Parties):
    """The same parties, with preferences; the union has those of both, and some that are held out."""

    def __init__(self, home):
        super().__init__(home)
        (home / "union.jsonl").write_text(as_lines(trained_pairs()[0]))
        remote = RUN.replace("REMOTE", REMOTE).replace("PREFERENCES", '{ template = "plain" }')
        (home / "run.toml").write_text(
            remote.replace("SHARE", "0.05").replace("PORT", self.port).replace("HOME", str(home))
        )
        local = RUN.replace("REMOTE", "").replace("SHARE", "0.1")
        local = local.replace("PREFERENCES", '{ sources = [{ path = "HOME/union.jsonl" }] }')
        (home / "local.toml").write_text(local.replace("HOME", str(home)))

    def _write_texts(self, name):
        texts = super()._write_texts(name)
        mine = trained_pairs()[1][("north", "south").index(name) :: 2]
        held_out = [pair(name, number) for number in range(100, 106)]
        for file, preferences in (("train", mine), ("test", held_out)):
            (self.home / name / f"{file}.jsonl").write_text(as_lines(preferences))
        return [*texts, *("".join(one.values()) for one in mine)]


def test_clients_with_preferences_train_in_processes_of_their_own_what_one_process_trains(tmp_path):
    parties = Choosers(tmp_path)
    try:
        local = parties.train("--run-dir", "runs/local", file="local")
        assert local.wait() == 0, parties.log("owner")
        serving = [parties.enclave(), parties.client("north"), parties.client("south")]
        owner = parties.train()

        assert owner.wait() == 0, parties.log("owner") + parties.log("enclave") + parties.log("north")
        assert [one.wait() for one in serving] == [0, 0, 0]
        # rows of a reference round by those that are computed beside them, so these are not always the same bits
        losses, others = ([row[1] for row in parties.rows(run)] for run in ("run", "local"))
        assert losses == pytest.approx(others, rel=1e-4)
        found = parties.summary()["preferences"]
        # without dropout the model is its reference at first
        assert found["margin_first"] == pytest.approx(0.0, abs=1e-4)
        assert found["kl"] is None
        assert found["accuracy"] > 0.8 and found["margin"] > 0.1
        owned = b"".join(one.read_bytes() for one in (tmp_path / "owner" / "runs" / "run").rglob("*.*"))
        assert b"asks" not in owned and "asks" not in parties.log("enclave") + parties.log("owner")
        assert len(list((tmp_path / "north" / "state").glob("reference-*.safetensors"))) == 1
        assert not list((tmp_path / "owner" / "runs" / "run").rglob("reference*"))
    finally:
        parties.close()


def test_a_client_that_is_killed_goes_on_with_the_reference_that_it_has(tmp_path):
    parties = Choosers(tmp_path)
    try:
        enclave, north, south = parties.enclave(), parties.client("north"), parties.client("south")
        owner = parties.train()
        metrics = tmp_path / "owner" / "runs" / "run" / "metrics.jsonl"
        parties.wait_for(owner, lambda: metrics.exists() and '"step": 12,' in metrics.read_text())
        north.send_signal(signal.SIGKILL)
        north.wait()
        assert owner.wait() == 4, parties.log("owner")
        again = parties.client("north")

        resumed = parties.train("--resume")

        assert resumed.wait() == 0, parties.log("owner") + parties.log("north")
        assert [one.wait() for one in (enclave, again, south)] == [0, 0, 0]
        assert parties.log("north").count("computing the reference") == 1
        assert parties.summary()["resumed_from"] >= 10
    finally:
        parties.close()
