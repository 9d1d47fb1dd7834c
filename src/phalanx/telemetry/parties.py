"""The parties of a run as people see them: one row each, in a file that is renewed while the run goes on.

RUN_DIR/peers.json
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from rich.console import Console, RenderableType
from rich.live import Live

from phalanx.closing import Closeable
from phalanx.config import StrictModel, printable_text
from phalanx.errors import InputError
from phalanx.telemetry.fitted_table import FittedTable
from phalanx.telemetry.run_files import open_run_file

PEERS_FILE = "peers.json"
STACKS_FILE = "stacks.json"
"""What each remote worker said of its threads, or why it said nothing, when it was given up or the run failed."""
PERIOD_S = 1.0
LATE_S = 10
"""A file of a run under way that is older than this was not renewed: its owner is gone, or hangs."""
MAX_VERDICTS, LONGEST_TEXT = 8, 200
_LONGEST_NAME = 80
_MAX_BYTES = 4 << 20
_RENEW_S = 5

PartyState = Literal[
    "invited",
    "certified",
    "waiting",
    "connected",
    "serving",
    "shadowing",
    "lost",
    "left",
    "refused",
    "evicted",
    "revoked",
]

_Count = Annotated[int, Field(ge=0)]
_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
_Name = Annotated[str, Field(max_length=_LONGEST_NAME)]


class PartyRow(StrictModel):
    """One party, from the owner's own observations; no value comes from the party.

    Attributes:
        state: Present part in the run.
        shadows: Stages of which it has the other copy.
        since: Second since 1970 from which on state and stages are these.
        since_step: The step that came next then; None before the first.
        steps: Applied steps in which it served or shadowed a stage, in this session.
        audits: Number of these microbatches that each check audited in a stage of the party.
        bytes_from: Bytes of frames that the owner accepted from it in this session.
        bytes_to: Bytes of frames that it took from the owner.
        heard: Second since 1970 at which the last frame of it was accepted; None where none was.
        note: Why it is lost, refused or revoked.
    """

    name: _Name
    state: PartyState
    serves: tuple[_Count, ...] = ()
    shadows: tuple[_Count, ...] = ()
    since: _Count | None = None
    since_step: _Count | None = None
    steps: _Count = 0
    audits: Mapping[_Name, _Count] = {}
    bytes_from: _Count = 0
    bytes_to: _Count = 0
    heard: _Count | None = None
    verdicts: Annotated[tuple[_Text, ...], Field(max_length=MAX_VERDICTS)] = ()
    note: _Text = ""

    @property
    def state_text(self) -> str:
        """State and stages, such as ``serving 1 2, shadowing 3``."""
        roles = [("serving", self.serves), ("shadowing", self.shadows)]
        duties = [f"{verb} {' '.join(map(str, stages))}" for verb, stages in roles if stages]
        return ", ".join(duties) if duties and self.state in ("serving", "shadowing") else self.state


class PartiesStatus(StrictModel):
    """All parties of a run at one moment.

    Attributes:
        steps: Steps of the whole run.
        written: Second since 1970 of that moment.
        ended: Whether the session is over.
    """

    version: Literal[1] = 1
    run: _Text
    step: _Count
    steps: _Count
    written: _Count
    ended: bool = False
    parties: tuple[PartyRow, ...] = ()


class PeersFile(Closeable):
    """The file with the parties' rows, renewed by a thread of its own; that it cannot be written stops no run.

    Args:
        path: The file; replaced at once, never half written.
        read: Makes the status; called once a second, from that thread.
    """

    def __init__(self, path: Path, read: Callable[[], PartiesStatus]) -> None:
        self._path, self._read = path, read
        self._written: PartiesStatus | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew_file, name="peers-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last status, which says that the session is over."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._write_status(self._read().model_copy(update={"ended": True}))

    def _renew_file(self) -> None:
        while not self._closed.wait(PERIOD_S):
            status, last = self._read(), self._written
            if last is None or _has_changed(status, last) or status.written - last.written >= _RENEW_S:
                self._write_status(status)

    def _write_status(self, status: PartiesStatus) -> None:
        fresh = self._path.with_name(f".{self._path.name}.new")
        with contextlib.suppress(OSError):
            fresh.write_text(status.model_dump_json(indent=1) + "\n", encoding="utf-8")
            fresh.replace(self._path)
            self._written = status


def _has_changed(status: PartiesStatus, last: PartiesStatus) -> bool:
    return (status.parties, status.step) != (last.parties, last.step)


def read_peers(path: Path) -> PartiesStatus | None:
    """Return the status in a file; None where there is no file."""
    try:
        with open_run_file(path) as file:
            data = file.read(_MAX_BYTES)
        return PartiesStatus.model_validate_json(data)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror})") from exc
    except ValidationError as exc:
        raise InputError(f"{path}: is no status of parties; the next start of the run writes it anew") from exc


def parties_table(rows: Sequence[PartyRow], now: float | None = None) -> RenderableType:
    """Return the rows as a table for a terminal, or as lines where it is too narrow for one.

    No text in it is read as markup or can steer the terminal, and no name is cut.
    """
    moment = time.time() if now is None else now
    heads = ("party", "state", "since", "steps", "audited", "from it", "to it", "heard")
    return FittedTable(heads, _table_cells(rows, moment), left=heads, frame=False, lines=parties_lines(rows, moment))


def live_parties(console: Console, rows: Callable[[], Sequence[PartyRow]]) -> contextlib.AbstractContextManager[object]:
    """Show rows below the printed lines, redrawn once a second; without a terminal show nothing."""
    if not console.is_terminal:
        return contextlib.nullcontext()
    rate = 1 / PERIOD_S
    return Live(console=console, get_renderable=lambda: parties_table(rows()), refresh_per_second=rate, transient=True)


def parties_lines(rows: Sequence[PartyRow], now: float | None = None) -> list[str]:
    """Return the rows as plain lines."""
    return ["  ".join(cell for cell in cells if cell) for cells in _table_cells(rows, now, labels=True)]


def _table_cells(rows: Sequence[PartyRow], now: float | None, *, labels: bool = False) -> list[tuple[str, ...]]:
    moment = time.time() if now is None else now
    table_rows: list[tuple[str, ...]] = []
    for row in rows:
        since = _time_ago(row.since, moment) if row.since_step is None else f"step {row.since_step}"
        audited = max(row.audits.values(), default=0)
        cells = (
            printable_text(row.name, _LONGEST_NAME),
            printable_text(row.state_text, LONGEST_TEXT),
            f"since {since}" if labels and since else since,
            _label_value(str(row.steps or ""), "steps", labels),
            _label_value(str(audited or ""), "audited", labels),
            _label_value(size_in_words(row.bytes_from), "from it", labels),
            _label_value(size_in_words(row.bytes_to), "to it", labels),
            f"heard {_time_ago(row.heard, moment)}" if labels and row.heard else _time_ago(row.heard, moment),
        )
        table_rows.append(cells)
    return table_rows


def _label_value(value: str, label: str, wanted: bool) -> str:
    return f"{value} {label}" if wanted and value else value


def _time_ago(moment: int | None, now: float) -> str:
    if moment is None:
        return ""
    seconds = max(0, int(now - moment))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def size_in_words(size_bytes: int) -> str:
    """Return a number of bytes for people; nothing for none."""
    if not size_bytes:
        return ""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
