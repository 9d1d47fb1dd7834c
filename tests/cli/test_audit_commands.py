"""``phalanx audit verify`` accepts a whole log and names the first broken line of any other."""

import json
from pathlib import Path

import pytest

from phalanx.cli import run_command
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import create_authority, issue_certificate, load_identity


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory of before there were records of steps: a few events and the owner's certificate."""
    folder = tmp_path / "run"
    folder.mkdir()
    create_authority(folder / "pki")
    issue_certificate(folder / "pki", "owner")
    with AuditLog(folder / "events.jsonl", load_identity(folder / "pki" / "owner"), "first") as log:
        log.append_event("run_started", {"step": 0, "audit_key_commitment": "00" * 32})
        log.append_event("verdict", {"step": 1})
        log.append_event("run_stopped", {"status": "interrupted"})
        head = {"num_events": log.current_head.num_events, "digest": log.current_head.digest}
    (folder / "summary.json").write_text(json.dumps({"audit_log_head": head}))
    return folder


def test_a_whole_log_is_accepted_and_an_old_one_said_to_prove_verdicts_only(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["audit", "verify", str(run_dir)]) == 0

    out = capsys.readouterr().out
    assert "every line is signed, in order and unchanged" in out
    assert "verdicts only" in out
    assert "events" in out


def test_the_log_of_an_unfinished_run_holds_as_far_as_it_goes_and_no_further(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "summary.json").unlink()

    assert run_command(["audit", "verify", str(run_dir)]) == 5

    shown = capsys.readouterr()
    assert "every line is signed, in order and unchanged" in shown.out
    assert "not proven: the log's end: the last session was stopped" in shown.err


def test_a_conviction_that_was_cut_off_is_not_passed_over_without_the_summary(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "summary.json").unlink()
    log = run_dir / "events.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])

    assert run_command(["audit", "verify", str(run_dir)]) == 5

    assert "the run has not ended" in capsys.readouterr().err


def test_an_empty_log_shows_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "events.jsonl").write_bytes(b"")
    (run_dir / "summary.json").write_text('{"audit_log_head": {"num_events": 0, "digest": ""}}')

    assert run_command(["audit", "verify", str(run_dir)]) == 5

    assert "no session of a run has started" in capsys.readouterr().err


def test_an_altered_line_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run_dir / "events.jsonl"
    log.write_text(log.read_text().replace('"step":1', '"step":7'))

    assert run_command(["audit", "verify", str(run_dir)]) == 5

    assert "line 2 is broken" in capsys.readouterr().err


def test_a_cut_off_tail_is_noticed_by_the_head_in_the_summary(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_dir / "events.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))

    assert run_command(["audit", "verify", str(run_dir)]) == 5

    assert "line 3 is missing" in capsys.readouterr().err


@pytest.mark.parametrize("summary", ["{}", "not json", '{"audit_log_head": 3}'])
def test_a_summary_without_a_head_is_refused(run_dir: Path, summary: str) -> None:
    (run_dir / "summary.json").write_text(summary)

    assert run_command(["audit", "verify", str(run_dir)]) == 5


def test_a_log_by_another_owner_is_refused_under_a_kept_certificate(run_dir: Path, tmp_path: Path) -> None:
    create_authority(tmp_path / "kept")
    issue_certificate(tmp_path / "kept", "owner")
    kept = tmp_path / "kept" / "owner" / "certificate.pem"

    assert run_command(["audit", "verify", str(run_dir)]) == 0
    assert run_command(["audit", "verify", str(run_dir), "--certificate", str(kept)]) == 5


@pytest.mark.parametrize("name", ["pki/authority.pem", "events.jsonl", "missing.pem"])
def test_a_file_that_is_no_owners_certificate_is_refused(
    run_dir: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["audit", "verify", str(run_dir), "--certificate", str(run_dir / name)]) == 5

    assert capsys.readouterr().err.startswith(f"error: {run_dir / name}: ")
