"""`phalanx init` and `phalanx doctor`: what a new user types first."""

import json
import shlex
from datetime import UTC, datetime, timedelta

import pytest

from phalanx.cli.outcome import run_command
from phalanx.launch.machine_check import CHECKS, _check_disk, _check_identity, check_machine
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.train import load_run


def test_init_writes_a_run_file_and_says_what_comes_next(tmp_path, capsys):
    path = tmp_path / "first.toml"

    code = run_command(["init", str(path), "--kind", "scratch"])

    assert code == 0
    assert load_run(path).pipeline.stages == 4
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {path}",
        f"  phalanx train {path} --dry-run",
        f"  phalanx train {path}",
    ]


def test_the_commands_that_init_prints_can_be_pasted_whatever_the_file_is_called(tmp_path, capsys):
    path = tmp_path / "my first run's file.toml"

    assert run_command(["init", str(path), "--kind", "remote"]) == 0

    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if "phalanx " in line]
    written = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#   phalanx train")]
    assert len(printed) == 3 and written
    assert all(str(path) in shlex.split(line, comments=True) for line in [*printed, *written])


@pytest.mark.parametrize("name", ["Qwen/Qwen2-0.5B", "gpt2"])
def test_init_tells_how_a_model_of_the_hub_is_fetched(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert run_command(["init", "first.toml", "--kind", "finetune", "--model", name]) == 3

    fetch = f"`hf download {name} --local-dir models/{name.split('/')[-1]}`, then set --model to"
    assert fetch in capsys.readouterr().err
    assert not (tmp_path / "first.toml").exists()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "folder"])
def test_init_says_of_an_empty_file_that_it_is_empty(name, tmp_path, capsys):
    path = tmp_path / name
    (path / "one.txt" if name == "folder" else path).parent.mkdir(exist_ok=True)
    (path / "one.txt" if name == "folder" else path).write_bytes(b"")

    assert run_command(["init", str(tmp_path / "first.toml"), "--kind", "scratch", "--data", str(path)]) == 3

    assert f"{path}: is empty; give" in capsys.readouterr().err


def test_init_for_remote_parties_says_how_to_make_their_keys(tmp_path, capsys):
    run_command(["init", str(tmp_path / "far.toml"), "--kind", "remote", "--workers", "ann, ben"])

    assert "--name ben  # prints a command for each; --host: your address" in capsys.readouterr().out


def test_init_replaces_no_file_unless_told_to(tmp_path, capsys):
    path = tmp_path / "first.toml"
    path.write_text("mine")

    assert run_command(["init", str(path), "--kind", "scratch"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert run_command(["init", str(path), "--kind", "scratch", "--force"]) == 0


def test_init_asks_nobody_where_nobody_can_answer(tmp_path, capsys):
    assert run_command(["init", str(tmp_path / "first.toml")]) == 2
    assert "--kind is missing; choose one of scratch, finetune" in capsys.readouterr().err


def test_a_machine_is_looked_at_from_every_side(tmp_path):
    findings = {finding.about: finding for finding in check_machine(tmp_path / "runs")}

    assert {"python", "torch", "cores", "memory", "disk", "kernels", "extras", "network", "clock"} <= findings.keys()
    assert findings["network"].state == findings["disk"].state == "good"
    assert len(CHECKS) == 9


def test_doctor_ends_with_3_for_what_no_run_gets_along_with(tmp_path, capsys):
    code = run_command(["doctor", "--run-dir", str(tmp_path), "--identity", str(tmp_path / "nobody"), "--json"])

    (found,) = (row for row in json.loads(capsys.readouterr().out)["findings"] if row["state"] == "bad")
    assert code == 3
    assert found["about"] == f"identity {tmp_path / 'nobody'}"
    assert "cannot be read" in found["found"]


def test_doctor_knows_a_good_identity(tmp_path, capsys):
    create_authority(tmp_path / "pki")
    issue_certificate(tmp_path / "pki", "alice")

    assert run_command(["doctor", "--run-dir", str(tmp_path), "--identity", str(tmp_path / "pki" / "alice")]) == 0
    assert "alice: keys and certificate belong together" in capsys.readouterr().out


@pytest.mark.parametrize(("days", "state"), [(13, "notice"), (15, "good")])
def test_doctor_warns_of_a_certificate_that_expires_soon(tmp_path, days, state):
    create_authority(tmp_path / "pki")
    issue_certificate(tmp_path / "pki", "alice", days=days)

    found = _check_identity(tmp_path / "pki" / "alice")

    assert found.state == state
    assert "valid until " in found.found
    assert ("before it expires" in found.advice) is (state == "notice")


def test_doctor_names_the_page_of_what_is_wrong_with_a_certificate(tmp_path):
    create_authority(tmp_path / "pki", 1000, datetime.now(UTC) - timedelta(days=700))
    issue_certificate(tmp_path / "pki", "alice", days=9, now=datetime.now(UTC) - timedelta(days=700))

    found = _check_identity(tmp_path / "pki" / "alice")

    assert (found.state, found.advice) == ("bad", "phalanx explain PHX-V013")


def test_a_place_inside_a_file_is_no_place_for_runs(tmp_path):
    (tmp_path / "file").touch()

    (found,) = _check_disk(tmp_path / "file" / "runs")

    assert found.state == "bad"
    assert found.found.endswith("file is a file")


@pytest.mark.parametrize("command", ["init", "doctor"])
def test_help_has_an_example(command, capsys):
    assert run_command([command, "--help"]) == 0
    assert f"Example: phalanx {command}" in capsys.readouterr().out
