"""A run in a project with roles: who may take its model out, what its reads leave behind, and its forms."""

import json

import pytest

from phalanx.cli import run_command
from phalanx.data.shards import fingerprint_of, load_signer
from phalanx.errors import PolicyError
from phalanx.governance.release import approve_run, check_run
from phalanx.policy import sign_policy, sign_roles, verify_access_log
from phalanx.train import PastRun, load_run
from tiny_run_file import tiny_run_file

PEOPLE = {"alice": ("owner",), "bob": ("releaser", "data_steward"), "carol": ("auditor",), "tom": ("trainer",)}


@pytest.fixture
def project(tmp_path, quietly, monkeypatch):
    """A run under a policy that wants an approval, in a project whose file of roles says of whom."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    home = tmp_path / "hospital"
    home.mkdir()
    monkeypatch.chdir(home)
    keys = {name: load_signer(tmp_path / f"{name}.key") for name in PEOPLE}
    (tmp_path / "roles.toml").write_text(
        'name = "hospital"\n'
        + "".join(
            f'[people.{name}]\nkeys = ["{fingerprint_of(keys[name])}"]\nroles = {json.dumps(roles)}\n'
            for name, roles in PEOPLE.items()
        )
    )
    (home / "policy.toml").write_text('name = "ours"\n[release]\napprovals = 1\n')
    sign_policy(home / "policy.toml", keys["alice"])
    text = tiny_run_file("[parallel]\ndp = 1\n", steps=2, validate_every=0)
    text += f'\n[policy]\nfile = "policy.toml"\nsigner = "{fingerprint_of(keys["alice"])}"\n'
    (home / "run.toml").write_text(text)
    quietly(load_run(home / "run.toml"), home / "run")
    sign_roles(tmp_path / "roles.toml", home, keys["alice"], None)
    return home


def act_as(monkeypatch, home, name):
    monkeypatch.setenv("PHALANX_KEY", str(home.parent / f"{name}.key"))


def test_a_model_leaves_by_two_people_and_its_reads_are_logged(project, monkeypatch):
    run = project / "run"
    export = ["checkpoint", "export", str(run), str(project.parent / "model")]
    act_as(monkeypatch, project, "tom")
    assert run_command(export) == 5
    act_as(monkeypatch, project, "alice")
    assert run_command(export) == 5
    assert not (project.parent / "model").exists()
    key = ["--key", str(project.parent / "bob.key")]
    assert run_command(["roles", "approve", "release", str(run), *key]) == 0
    with pytest.raises(PolicyError, match="nobody with the key"):
        approve_run(PastRun(run), load_signer(project.parent / "tom.key"))
    assert [breach.clause for breach in check_run(PastRun(run))[1]] == ["release.approvals"]
    assert run_command(["policy", "approve", str(run), *key]) == 0
    assert run_command(export) == 0

    log = verify_access_log(project).entries
    kinds = [
        (entry.kind, entry.body["person"], entry.body.get("what") or entry.body.get("action")) for entry in log[1:]
    ]
    assert kinds[0] == ("refused", "tom", "command")
    assert kinds[1] == ("refused", "alice", "act")
    assert ("approval", "bob", "release") in kinds
    assert ("act", "alice", "release") in kinds
    assert ("read", "alice", "checkpoint") in kinds


def test_the_command_fills_forms_from_a_run(project, monkeypatch):
    act_as(monkeypatch, project, "carol")
    run, out = project / "run", project.parent / "forms"

    assert run_command(["forms", str(run), "--out", str(out)]) == 0
    card = json.loads((out / "model_card.json").read_text())
    fields = {field["title"]: field for section in card["sections"] for field in section["fields"]}
    summary = json.loads((run / "summary.json").read_text())
    assert fields["Applied steps"]["value"] == summary["steps"] == 2
    assert fields["Digest of the weights"]["value"] == summary["final_weights_digest"]
    assert fields["Intended use"]["source"] is None
    tokens, parameters = fields["Tokens"]["value"], fields["Parameters"]["value"]
    assert parameters > 1000
    assert fields["Operations, estimated as 6 x parameters x tokens"]["value"] == 6 * tokens * parameters
    assert "hospital" not in (out / "model_card.md").read_text()
    assert "tom | trainer" in (out / "training_plan.md").read_text()
    (run / "summary.json").write_text(json.dumps({**summary, "final_weights_digest": "0" * 64}))
    assert run_command(["forms", str(run), "--out", str(out.with_name("other"))]) == 5
