"""``phalanx audit verify`` accepts a whole log and names the first broken line of any other."""

import json
from pathlib import Path

import pytest

from phalanx.cli import run
from phalanx.cli.audit import OWNER_CERTIFICATE
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import create_authority, issue, load_identity


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with three events and the owner's certificate."""
    folder = tmp_path / "run"
    pki = (folder / OWNER_CERTIFICATE).parent.parent
    folder.mkdir()
    create_authority(pki)
    issue(pki, "owner")
    with AuditLog(folder / "events.jsonl", load_identity(pki / "owner"), "first") as log:
        for step in range(3):
            log.append("verdict", {"step": step})
        head = {"num_events": log.head.num_events, "digest": log.head.digest}
    (folder / "summary.json").write_text(json.dumps({"audit_log_head": head}))
    return folder


def test_a_whole_log_is_accepted(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "verify", str(run_dir)]) == 0

    out = capsys.readouterr().out
    assert "every line is signed, in order and unchanged" in out
    assert "events" in out


def test_the_log_of_an_unfinished_run_is_accepted(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()

    assert run(["audit", "verify", str(run_dir)]) == 0


def test_an_altered_line_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run_dir / "events.jsonl"
    log.write_text(log.read_text().replace('"step":1', '"step":7'))

    assert run(["audit", "verify", str(run_dir)]) == 5

    assert "line 2 is broken" in capsys.readouterr().err


def test_a_cut_off_tail_is_noticed_by_the_head_in_the_summary(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_dir / "events.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))

    assert run(["audit", "verify", str(run_dir)]) == 5

    assert "line 3 is missing" in capsys.readouterr().err


@pytest.mark.parametrize("summary", ["{}", "not json", '{"audit_log_head": 3}'])
def test_a_summary_without_a_head_is_refused(run_dir: Path, summary: str) -> None:
    (run_dir / "summary.json").write_text(summary)

    assert run(["audit", "verify", str(run_dir)]) == 5


def test_a_log_by_another_owner_is_refused_under_a_kept_certificate(run_dir: Path, tmp_path: Path) -> None:
    create_authority(tmp_path / "kept")
    issue(tmp_path / "kept", "owner")
    kept = tmp_path / "kept" / "owner" / "certificate.pem"

    assert run(["audit", "verify", str(run_dir)]) == 0
    assert run(["audit", "verify", str(run_dir), "--certificate", str(kept)]) == 5


@pytest.mark.parametrize("name", ["pki/authority.pem", "events.jsonl", "missing.pem"])
def test_a_file_that_is_no_owners_certificate_is_refused(
    run_dir: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["audit", "verify", str(run_dir), "--certificate", str(run_dir / name)]) == 5

    assert capsys.readouterr().err.startswith(f"error: {run_dir / name}: ")
