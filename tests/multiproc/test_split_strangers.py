"""Clients of a split that lie, prove their machine, or lose their certificate, in processes of their own."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from test_remote_split_runs import Parties

import phalanx
from phalanx.config import digest_config
from phalanx.security.crypto import RevokedParties
from phalanx.split.hardware.measure import measure_code
from phalanx.train import load_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LIAR = str(Path(__file__).with_name("lying_client.py"))
HANGS = str(Path(__file__).with_name("hanging_client.py"))
# of four microbatches the liar, which has the first turn, has two
CLIENTS = ("west", "north", "south")
THREE = {
    '["north", "south"]': '["west", "north", "south"]',
    "clients = 2": "clients = 3",
    "steps = 120": "steps = 20",
    "validate_every = 60": "validate_every = 20",
    "batch_size = 8": "batch_size = 16",
}
SHORT = {"steps = 120": "steps = 6", "validate_every = 60": "validate_every = 6"}
MEDIAN = '[split.admission]\nrule = "median"\nbyzantine = 1\nmomentum = 0.8\n'


def section(text):
    """A change of the run file that adds a section."""
    return {"[split.transport]": f"{text}\n[split.transport]"}


def policy_for(name):
    """A policy of the run file that accepts this very program, in a simulation of a TEE."""
    where = f"split.client_policies.{name}"
    code = f'measurements.code = ["{measure_code().hex()}"]'
    return section(f"[{where}]\nallow_insecure_sim = true\n[{where}.sim]\n{code}\n")


@pytest.fixture
def gather(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(**given):
            parties = Parties(tmp_path, **given)
            stack.callback(parties.close)
            return parties

        yield start


def swap_labels(parties, name):
    """Have a client's training texts say the other class each; what it is measured by stays right."""
    path = parties.home / name / "train.jsonl"
    other = {"flu": "cold", "cold": "flu"}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "diagnosis": other[row["diagnosis"]]}) + "\n" for row in rows))


def finish(parties, west):
    """Run to the end beside the other clients; returns the held-out accuracy over all."""
    others = [parties.enclave(), parties.client("north"), parties.client("south")]
    owner = parties.train()
    assert owner.wait() == 0, parties.log("owner") + parties.log("enclave") + parties.log("west")
    assert [one.wait() for one in (*others, west)] == [0, 0, 0, 0]
    assert parties.summary()["status"] == "completed"
    return parties.rows()[-1][4]


@pytest.mark.parametrize(
    ("admission", "reason"),
    [(f"{MEDIAN}patience = 5\n", "far"), (f"{MEDIAN}far = 1000.0\nmax_norm = 2.5\n", "over_norm")],
    ids=["by the rule", "by the norm"],
)
def test_a_client_with_swapped_labels_is_refused_and_the_run_completes(gather, admission, reason):
    parties = gather(clients=CLIENTS, changes={**THREE, **section(admission)})
    swap_labels(parties, "west")

    accuracy = finish(parties, parties.client("west"))

    assert accuracy == 1.0
    shut_out = parties.events("client_excluded")
    assert [(body["client"], body["reason"]) for _, body in shut_out] == [("west", reason)]
    assert list(parties.summary()["split"]["admission"]["excluded"]) == ["west"]
    assert "is excluded" in parties.log("owner")


def test_the_same_client_wins_where_the_run_has_no_admission(gather):
    parties = gather(clients=CLIENTS, changes=THREE)
    swap_labels(parties, "west")

    # what is left to chance of 27 texts, where all are right without the lies
    assert finish(parties, parties.client("west")) < 0.85
    assert parties.events("client_refused", "client_excluded") == []


def test_a_client_that_sends_no_numbers_is_refused_and_the_run_completes(gather):
    parties = gather(clients=CLIENTS, changes={**THREE, **section("[split.admission]")})

    accuracy = finish(parties, parties.start("west", "client.toml", program=(LIAR,)))

    assert accuracy == 1.0
    refused = [body["reason"] for kind, body in parties.events("client_refused") if body["client"] == "west"]
    assert set(refused) == {"not_finite"}
    assert [body["client"] for _, body in parties.events("client_excluded")] == ["west"]


def test_the_same_client_ends_the_run_where_there_is_no_admission(gather):
    parties = gather(clients=CLIENTS, changes=THREE)
    parties.start("west", "client.toml", program=(LIAR,))
    for name in ("north", "south"):
        parties.client(name)
    parties.enclave()

    assert parties.train().wait() == 4
    assert "[split.admission] leaves out a client that sends no numbers" in " ".join(parties.log("owner").split())


@pytest.mark.parametrize("tier", ["sim", "process"])
def test_a_client_that_proves_its_program_trains_and_the_owners_log_says_by_which_policy(gather, tier):
    changed = {} if tier == "sim" else {"allow_insecure_sim = true\nstep": f'tier = "{tier}"\nstep'}
    parties = gather(changes={**SHORT, **policy_for("south"), **changed, "240.0": "60.0"})
    parties.say("south", 'attester = "sim"')

    serving = [parties.enclave(), parties.client("north"), parties.client("south")]
    owner = parties.train()

    if owner.wait() != 0 and "isolation" in parties.log("enclave"):
        pytest.skip(parties.log("enclave").strip().splitlines()[-1])
    assert owner.returncode == 0, parties.log("owner") + parties.log("south")
    assert [one.wait() for one in serving] == [0, 0, 0]
    policy = digest_config(load_run(parties.home / "run.toml").split.client_policies["south"])
    facts = [(body["client"], body["evidence"], body["policy"]) for _, body in parties.events("client_appraised")]
    assert facts == [("south", "sim", policy)]
    assert list(parties.summary()["split"]["appraised_clients"]) == ["south"]


def test_a_client_of_another_program_is_refused_and_the_owner_is_told(gather, tmp_path):
    parties = gather(changes={**SHORT, **policy_for("south"), "240.0": "30.0"})
    changed = tmp_path / "changed"
    shutil.copytree(Path(phalanx.__file__).parent, changed / "phalanx", ignore=shutil.ignore_patterns("__pycache__"))
    (changed / "phalanx" / "split" / "roles" / "added.py").write_text('"""One file more than the others have."""\n')
    # it knows the enclave's program, and is another one itself
    code = measure_code().hex()
    trusts = f'allow_insecure_sim = true\n[sim]\nmeasurements.code = ["{code}"]\n'
    (parties.home / "south" / "policy.toml").write_text(trusts)
    file = parties.home / "south" / "client.toml"
    file.write_text(file.read_text().replace("allow_insecure_sim = true", 'policy = "policy.toml"\nattester = "sim"'))
    enclave, north = parties.enclave(), parties.client("north")
    south = parties.start("south", "client", "client.toml", PYTHONPATH=str(changed))
    owner = parties.train()

    assert owner.wait() == 4, parties.log("owner") + parties.log("south")
    assert south.wait() == 5, parties.log("south")
    assert "wrong_measurement" in parties.log("south")
    told = [(body["client"], body["reason"]) for _, body in parties.events("client_evidence_refused")]
    assert told == [("south", "wrong_measurement")]
    assert parties.events("client_appraised") == []
    assert (enclave.poll(), north.poll()) == (None, None)


def test_a_client_is_asked_for_nothing_once_the_owner_has_revoked_it_also_after_a_resume(gather):
    parties = gather()
    serving = [parties.enclave(), parties.client("north"), parties.client("south")]
    owner = parties.train()
    metrics = parties.home / "owner" / "runs" / "run" / "metrics.jsonl"
    parties.wait_for(owner, lambda: metrics.exists() and '"step": 12,' in metrics.read_text())
    revoking = parties.start(
        "owner", "peers", str(parties.home / "run.toml"), "--revoke", "south", "--reason", "copied"
    )

    assert (revoking.wait(), owner.wait()) == (0, 4), parties.log("owner")
    assert [one.poll() for one in serving] == [None, None, None]
    ((_, body),) = parties.events("revoked")
    assert (body["party"], body["reason"]) == ("south", "copied")
    assert len(parties.rows()) == body["step"] < 120

    (RevokedParties(parties.home / "keys")._path).unlink()
    again = parties.train("--resume")

    assert again.wait() == 4
    assert "south: the certificate was revoked" in " ".join(parties.log("owner").split())


def test_a_client_that_hangs_is_on_the_card_with_the_place_where_it_hangs(gather):
    parties = gather(changes=SHORT)
    for name in ("north", "south"):
        # who listens nowhere cannot be asked
        file = parties.home / name / "client.toml"
        file.write_text('advertise = "127.0.0.1"\n' + file.read_text())
    parties.enclave()
    parties.client("north")
    south = parties.start("south", "client.toml", program=(HANGS,))
    owner = parties.train()
    stacks = parties.home / "owner" / "runs" / "run" / "stacks.json"
    parties.wait_for(owner, lambda: stacks.exists() and "hang_for_ever" in stacks.read_text())

    south.kill()
    assert owner.wait() == 4, parties.log("owner")

    assert "waiting for south" in parties.log("owner")
    card = parties.start("owner", "watch", "runs/run", "--card", "--json")
    assert card.wait() == 0, parties.log("owner")
    (found,) = json.loads(parties.log("owner").splitlines()[-1])["cards"].values()
    # it was asked when it was late, and is gone since
    assert found["stacks"]["south"][0] == "as it reports itself:"
    lines = found["stacks"]["south"]
    assert any(line.startswith("  hanging_client.py:") and line.endswith(" hang_for_ever") for line in lines)
    # nor did the other client cause it, but it was asked as well
    assert set(found["stacks"]) == {"owner", "north", "south"}
