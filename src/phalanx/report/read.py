"""Read a run directory as far as possible: a missing or broken file becomes a note, never a crash."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import InputError
from phalanx.report.figures import parse_number
from phalanx.telemetry.run_files import open_run_file, parse_row

_FILES = ("config.toml", "summary.json", "metrics.jsonl", "events.jsonl")
_MAX_EVIDENCE_BYTES = 1024 * 1024
_MAX_EVIDENCE_FILES = 200

Row = dict[str, Any]


@dataclass
class RunRecord:
    """The contents of a run directory; every value in it is as untrusted as the file it came from.

    Attributes:
        config_text: The resolved run file, empty when missing.
        metrics: One row a step, in the order of the file; each has a number ``step``.
        rounds: One row a federated round, and one a measurement of its sites; empty of other runs.
        events: The audit log, unchecked; each has a text ``kind`` and an object ``body``.
        notes: Missing or omitted parts, one sentence each.
        proof: Proof by the audit log, in one sentence; empty where the log was not checked.
    """

    name: str
    config_text: str = ""
    config: Row = field(default_factory=dict)
    summary: Row = field(default_factory=dict)
    metrics: list[Row] = field(default_factory=list)
    rounds: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    evidence: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    proof: str = ""

    def events_of(self, *kinds: str) -> list[Row]:
        """Return the events of the given kinds, in order."""
        return [event for event in self.events if event["kind"] in kinds]


def check_run(run_dir: Path) -> None:
    """Refuse a directory from which no report can be made."""
    if not run_dir.is_dir():
        raise InputError(
            f"{run_dir}: is not a directory; give the run directory that phalanx train printed"
        ).with_facts(**_no_run(run_dir, "no directory"))
    if not any((run_dir / name).exists() for name in _FILES):
        raise InputError(
            f"{run_dir}: holds no run: none of {', '.join(_FILES)} is there; give the run directory that phalanx train "
            "printed"
        ).with_facts(**_no_run(run_dir, "none of its files"))


def _no_run(run_dir: Path, found: str) -> dict[str, str]:
    facts = {"file": str(run_dir), "key": "RUN_DIR", "found": found, "expected": "the directory of a run"}
    return {"code": "PHX-I051", **facts, "do": "give the run directory that phalanx train printed"}


def read_run(run_dir: Path) -> RunRecord:
    """Read everything that a report shows."""
    check_run(run_dir)
    record = RunRecord(run_dir.resolve().name)
    _read_config(run_dir / "config.toml", record)
    _read_summary(run_dir / "summary.json", record)
    record.metrics = _read_lines(run_dir / "metrics.jsonl", record, "no curves can be drawn", _is_metric)
    if (run_dir / "rounds.jsonl").exists():
        record.rounds = _read_lines(run_dir / "rounds.jsonl", record, "no sites can be shown", _is_metric)
    record.events = _read_lines(run_dir / "events.jsonl", record, "no verdicts can be shown", _is_event)
    _read_evidence(run_dir / "evidence", record)
    return record


def _read_config(path: Path, record: RunRecord) -> None:
    record.config_text = _read_text(path, record, "the settings are not known") or ""
    try:
        record.config = tomllib.loads(record.config_text)
    except (tomllib.TOMLDecodeError, RecursionError):
        record.notes.append(f"{path.name} is not valid TOML; it is shown as it is.")


def _read_summary(path: Path, record: RunRecord) -> None:
    text = _read_text(path, record, "the run has not finished, or did not get to write it")
    if text is None:
        return
    summary = parse_row(text.encode())
    if summary is not None:
        record.summary = summary
    else:
        record.notes.append(f"{path.name} is not a JSON object; final figures are not shown.")


def _read_lines(path: Path, record: RunRecord, lost: str, is_good: Callable[[Row], bool]) -> list[Row]:
    text = _read_text(path, record, lost)
    lines = [] if text is None else text.split("\n")
    if lines and not lines[-1].strip():
        lines.pop()
    rows, bad = [], []
    for position, raw_line in enumerate(lines, start=1):
        row = parse_row(raw_line.encode())
        if row is not None and is_good(row):
            rows.append(row)
        else:
            bad.append(position)
    if bad:
        others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        record.notes.append(f"{path.name}: line {bad[0]}{others} cannot be read and was left out.")
    if text is not None and not rows:
        record.notes.append(f"{path.name} holds nothing yet; {lost}.")
    return rows


def _is_metric(row: Row) -> bool:
    return parse_number(row.get("step")) is not None


def _is_event(row: Row) -> bool:
    return isinstance(row.get("kind"), str) and isinstance(row.get("body"), dict)


def _read_evidence(directory: Path, record: RunRecord) -> None:
    if not directory.is_dir():
        return
    paths = sorted(path for path in directory.glob("*.json") if path.is_file())
    for path in paths[:_MAX_EVIDENCE_FILES]:
        text = _read_text(path, record, "its verdict is shown without it")
        if text is None:
            continue
        if len(text) > _MAX_EVIDENCE_BYTES:
            text = text[:_MAX_EVIDENCE_BYTES] + "\n… (cut here; the file has it all)"
        record.evidence[path.name] = text
    if len(paths) > _MAX_EVIDENCE_FILES:
        record.notes.append(f"{len(paths) - _MAX_EVIDENCE_FILES} further evidence files are not shown.")


def _read_text(path: Path, record: RunRecord, lost: str) -> str | None:
    try:
        with open_run_file(path) as file:
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        record.notes.append(f"{path.name} is missing: {lost}.")
    except OSError as exc:
        record.notes.append(f"{path.name} cannot be read ({exc.strerror}): {lost}.")
    return None
