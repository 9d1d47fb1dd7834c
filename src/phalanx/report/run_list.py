"""The runs in a directory, a row each, and which of them a question asks for."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from phalanx.errors import InputError
from phalanx.report.figures import parse_number, short_text
from phalanx.report.read import RunRecord, read_run

RECORD = "run.json"
STATES = ("completed", "interrupted", "failed", "unfinished")
"""The states of a run; one without a summary is under way, or was killed."""
ENGINES = ("pipeline", "parallel", "split", "federated")
_DEPTH = 3
_MAX_RUNS = 10_000


@dataclass(frozen=True)
class RunRow:
    """One run of a list; all of it is what its files say.

    Attributes:
        loss: Validation loss at the end, nats a token, or the last training loss of a run that has none.
        begun: Date of its first step, UTC; empty where none was made.
    """

    directory: str
    state: str
    engine: str
    model: str
    steps: int
    loss: float | None
    begun: str

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class RunFilter:
    """What is asked for; an empty value asks for nothing.

    Attributes:
        model: Part of the model's name, without regard to case.
        max_loss: Runs with this loss or a lower one.
        since: Runs begun on this day (UTC) or later.
        until: Runs begun on this day or earlier.
    """

    state: str = ""
    engine: str = ""
    model: str = ""
    max_loss: float | None = None
    since: date | None = None
    until: date | None = None

    def accepts(self, row: RunRow) -> bool:
        """Whether a run is asked for; a date or a loss that a run lacks is not the one asked for."""
        day = date.fromisoformat(row.begun[:10]) if row.begun else None
        return (
            self.state in ("", row.state)
            and self.engine in ("", row.engine)
            and self.model.casefold() in row.model.casefold()
            and (self.max_loss is None or (row.loss is not None and row.loss <= self.max_loss))
            and (self.since is None or (day is not None and day >= self.since))
            and (self.until is None or (day is not None and day <= self.until))
        )


def list_runs(directory: Path, wanted: RunFilter | None = None) -> list[RunRow]:
    """Return the runs in a directory and the two levels below it, the latest first."""
    if not directory.is_dir():
        raise InputError(f"{directory}: is not a directory; give the one that holds run directories").with_facts(
            file=str(directory), found="no directory", expected="a directory of runs"
        )
    rows = [read_row(path, directory) for path in _find_runs(directory, _DEPTH)]
    accepted = [row for row in rows if wanted is None or wanted.accepts(row)]
    return sorted(accepted, key=lambda row: (row.begun, row.directory), reverse=True)


def read_row(path: Path, base: Path) -> RunRow:
    """Return the row of one run directory, named by its place below another one."""
    record = read_run(path)
    first = record.metrics[0].get("time") if record.metrics else None
    seconds = parse_number(first)
    begun = "" if seconds is None or not 0 <= seconds < 2**33 else datetime.fromtimestamp(seconds, UTC).isoformat()
    status = str(record.summary.get("status", "unfinished"))
    return RunRow(
        directory=str(path.relative_to(base)) if path != base else ".",
        state=status if status in STATES else "unfinished",
        engine=engine_of(record),
        model=model_of(record),
        steps=int(parse_number(record.metrics[-1].get("step")) or 0) + 1 if record.metrics else 0,
        loss=final_loss(record),
        begun=begun[:19],
    )


def engine_of(record: RunRecord) -> str:
    """Return the engine that the sections of a run file ask for."""
    sections = record.config
    return next((engine for engine in ("federated", "split", "parallel") if engine in sections), "pipeline")


def model_of(record: RunRecord) -> str:
    """Return the model's name or path; of one from scratch, its type, with layers and width."""
    model = record.config.get("model")
    model = model if isinstance(model, dict) else {}
    shape = model.get("architecture")
    if not isinstance(shape, dict):
        return short_text(model.get("name") or model.get("path") or "", 80)
    layers = shape.get("num_hidden_layers", shape.get("n_layer"))
    width = shape.get("hidden_size", shape.get("n_embd"))
    return short_text(f"{shape.get('model_type')} {layers}x{width}", 80)


def final_loss(record: RunRecord) -> float | None:
    """Return the last validation loss; of a run without one, the last training loss."""
    from phalanx.report.loss import curve_of  # noqa: PLC0415 - it imports what draws

    curve = curve_of(record.metrics, "")
    for points in (curve.validation, *curve.named.values(), curve.loss):
        values = [value for _, value in points if value is not None]
        if values:
            return values[-1]
    return None


def _find_runs(directory: Path, depth: int) -> Iterator[Path]:
    """Yield run directories; no link is followed, and none is looked for inside a run."""
    if (directory / RECORD).is_file():
        yield directory
        return
    if not depth:
        return
    children = sorted(child for child in directory.iterdir() if child.is_dir() and not child.is_symlink())
    for child in children[:_MAX_RUNS]:
        if not child.name.startswith("."):
            yield from _find_runs(child, depth - 1)


def parse_day(text: str) -> date:
    """Return a day written as 2026-11-29."""
    try:
        return date.fromisoformat(text)
    except ValueError as exc:
        raise InputError(f"{text!r}: is no date; write it as 2026-11-29").with_facts(
            found=json.dumps(text), expected="a date such as 2026-11-29"
        ) from exc
