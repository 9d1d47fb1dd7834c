"""The last session of a killed run is closed afterwards: its key is told, and every audit can be drawn again."""

import json
import os
import signal

import pytest

from forked_child import run_in_fork
from phalanx.cli.outcome import run_command
from phalanx.train.records.audit_trail import open_log
from phalanx.train.records.proof import verify_run
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions import hooks


@pytest.fixture
def killed(make_run, quietly, tmp_path, monkeypatch):
    """A run with a process that was killed after step 4 of 6; its last checkpoint is of step 4."""
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(hooks.RunHooks, "save_if_due", stop)
        assert run_in_fork(lambda: quietly(make_run(), tmp_path / "run")) == -signal.SIGKILL
    return tmp_path / "run"


def events(run_dir, kind):
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line["body"] for line in lines if line["kind"] == kind]


def test_a_killed_session_is_closed_and_its_audits_can_be_drawn_again(killed, make_run, quietly, trained_once, capsys):
    before = verify_run(killed).unproven
    assert any("not revealed" in sentence for sentence in before)
    assert any("the log's end" in sentence for sentence in before)

    assert run_command(["audit", "close", str(killed), "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "interrupted"
    assert verify_run(killed).unproven == ()
    assert verify_run(killed).proven == 5
    assert not (killed / "secrets" / "audit.key").exists()
    assert json.loads((killed / "summary.json").read_text())["steps"] == 4

    assert run_command(["audit", "close", str(killed)]) == 0
    assert len(events(killed, "run_stopped")) == len(events(killed, "audit_key_revealed")) == 1
    summary = quietly(make_run(), killed, resume=True)

    assert summary["status"] == "completed"
    assert summary["final_weights_digest"] == trained_once[0]["final_weights_digest"]
    keys = [body["commitment"] for body in events(killed, "audit_key_revealed")]
    assert len(keys) == len(set(keys)) == 2
    assert run_command(["audit", "verify", str(killed)]) == 0


def test_a_run_at_work_is_not_closed(killed, make_run):
    written = (killed / "events.jsonl").read_bytes()
    with RunDirectory(killed, make_run(), resume=True) as home, open_log(home):
        assert run_command(["audit", "close", str(killed)]) == 5

    assert (killed / "events.jsonl").read_bytes() == written
    assert (killed / "secrets" / "audit.key").exists()


def test_what_is_no_run_and_what_has_ended_is_not_closed_again(tmp_path, trained_once, capsys):
    assert run_command(["audit", "close", str(tmp_path)]) == 3
    log = (trained_once[1] / "events.jsonl").read_bytes()

    assert run_command(["audit", "close", str(trained_once[1])]) == 0

    assert (trained_once[1] / "events.jsonl").read_bytes() == log
    assert "completed" in capsys.readouterr().out
