"""One run as it is now, from the files of its directory."""

import tomllib
from collections import Counter, deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.config import printable_text
from phalanx.errors import InputError
from phalanx.report import check_run
from phalanx.report.timeline import describe_event
from phalanx.telemetry import PEERS_FILE
from phalanx.telemetry.parties import PartiesStatus, read_peers
from phalanx.telemetry.run_files import open_run_file
from phalanx.watch.curves import CurveHistory, is_step
from phalanx.watch.growing_files import GrowingRows, Row, find_owner, read_object, read_tail
from phalanx.watch.security_events import SecurityCounts, SecurityEvent, read_security_event

MAX_SHOWN_EVENTS = 200
_MAX_TAIL = 60
_MAX_LOGS = 32
_LOG_FOLDERS = ("workers", "sites")
_MAX_DECISIONS = 1000
_MAX_CONFIG_BYTES = 4 << 20
_DECISIONS = frozenset(
    {
        *("verdict", "rollout_verdict", "evicted", "lost", "replaced", "link_broken", "not_let_in", "revoked"),
        *("batch_skipped", "memory_short", "site_excluded", "client_excluded", "round_lost", "fell_back"),
    }
)
_COUNTED = ("verdict", "evicted", "takeover", "replaced", "lost", "rolled_back")


class RunView:
    """What a run has written so far; `read_new` brings it up to date.

    Raises:
        InputError: There is no run in the directory.

    Attributes:
        name: Name of the run directory, without its path.
        history: Curves by step, from ``metrics.jsonl``.
        last_row: The newest line of ``metrics.jsonl``; None before the first step.
        event_counts: Events of the log by kind.
        security: Number of security events of each class so far.
        num_non_finite: Steps in which a figure was NaN or infinite.
        peers: The parties; None of a run that has none.
        summary: ``summary.json``; None while the run goes on.
        decisions: Events about parties and batches, oldest first, as (kind, body).
        owner: Process id of the run on this machine; None where there is none, or the kernel does not show it.
    """

    def __init__(self, run_dir: Path) -> None:
        check_run(run_dir)
        self.path, self.name = run_dir, run_dir.resolve().name
        self._metrics, self._events = GrowingRows(run_dir / "metrics.jsonl"), GrowingRows(run_dir / "events.jsonl")
        self._begin_metrics()
        self._begin_events()
        self.peers: PartiesStatus | None = None
        self.summary: Row | None = None
        self.owner: int | None = None
        record = read_object(run_dir / "run.json") or {}
        self.run_id, self.config_digest = str(record.get("run", ""))[:64], str(record.get("config_digest", ""))[:64]
        self.config = _read_config(run_dir / "config.toml")

    def _begin_metrics(self) -> None:
        self.history, self.num_non_finite = CurveHistory(), 0
        self.last_row: Row | None = None
        self.tokens = self.num_audits = self.num_alarms = 0
        self.link_bytes: Counter[str] = Counter()
        self.new_rows: list[Row] = []

    def _begin_events(self) -> None:
        self.event_counts: Counter[str] = Counter()
        self.security = SecurityCounts()
        self.shown_events: deque[dict[str, Any]] = deque(maxlen=MAX_SHOWN_EVENTS)
        self.security_events: deque[SecurityEvent] = deque(maxlen=MAX_SHOWN_EVENTS)
        self.new_security_events: list[SecurityEvent] = []
        self.decisions: deque[tuple[str, Row]] = deque(maxlen=_MAX_DECISIONS)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None where no file says it."""
        if self.peers is not None:
            return self.peers.steps
        steps = self.config.get("train", {}).get("steps") if isinstance(self.config.get("train"), dict) else None
        return steps if isinstance(steps, int) else None

    @property
    def status(self) -> str:
        """One of ``running``, ``gone`` (it has neither ended nor a process here), or the status of the summary."""
        if self.owner is not None:
            return "running"
        if self.summary is not None:
            return printable_text(str(self.summary.get("status", "unknown")), 20)
        has_begun = self.last_row is not None or bool(self.event_counts)
        return "gone" if has_begun and Path("/proc/locks").exists() else "running"

    def read_new(self) -> bool:
        """Read the additions since the last call; return whether more can be read at once."""
        rows, is_new = self._metrics.read_new()
        if is_new:
            self._begin_metrics()
        self.new_rows = [row for row in rows if is_step(row.get("step"))]
        for row in self.new_rows:
            self._add_step(row)
        events, is_new = self._events.read_new()
        if is_new:
            self._begin_events()
        self.new_security_events = []
        for event in events:
            self._add_event(event)
        self.owner = find_owner(self.path / "events.jsonl")
        self.summary = read_object(self.path / "summary.json") if self.owner is None else None
        try:
            self.peers = read_peers(self.path / PEERS_FILE)
        except InputError:
            self.peers = None
        return bool(rows or events)

    def _add_step(self, row: Row) -> None:
        self.history.add_row(row)
        self.last_row = row
        self.num_non_finite += bool(row.get("non_finite"))
        self.tokens += _count_of(row.get("tokens"))
        self.num_audits += _count_of(row.get("audits"))
        self.num_alarms += _count_of(row.get("alarms"))
        links = row.get("bytes")
        for link, size in links.items() if isinstance(links, dict) else ():
            if link in self.link_bytes or len(self.link_bytes) < 1000:
                self.link_bytes[link] += _count_of(size)

    def _add_event(self, row: Row) -> None:
        kind, body = row.get("kind"), row.get("body")
        if not isinstance(kind, str) or not isinstance(body, dict):
            return
        self.event_counts[kind[:60]] += 1
        security_event = read_security_event(row)
        if security_event is not None:
            self.security.add_event(security_event.security_class)
            self.security_events.append(security_event)
            self.new_security_events.append(security_event)
        if kind in _DECISIONS:
            self.decisions.append((kind, body))
        if kind != "step":
            text = printable_text(describe_event(kind, body), 300)
            self.shown_events.append({"time": str(row.get("time", ""))[:40], "kind": kind[:60], "text": text})

    def list_logs(self) -> list[Path]:
        """Return the logs of local processes: workers, an enclave, and sites of federated rounds."""
        # a link could lead to files of this machine
        folders = [path for name in _LOG_FOLDERS if (path := self.path / name).is_dir() and not path.is_symlink()]
        return sorted(path for folder in folders for path in folder.glob("*.log"))[:_MAX_LOGS]

    def read_logs(self) -> dict[str, list[str]]:
        """Return the last lines of each log; no character in them can steer a terminal."""
        return {
            path.name: [printable_text(text, 400) for text in read_tail(path, _MAX_TAIL)] for path in self.list_logs()
        }

    def describe(self) -> dict[str, Any]:
        """Return everything that a page shows of the run but its curves, as JSON data."""
        last, peers = self.last_row or {}, self.peers
        return {
            "name": printable_text(self.name, 80),
            "status": self.status,
            "steps": self.total_steps,
            "num_rows": self.history.num_rows,
            "curves": list(self.history.curve_names),
            "last": {
                key: last.get(key) for key in ("step", "time", "loss", "tokens_per_s", "wall_s", "mfu", "epsilon")
            },
            "tokens": self.tokens,
            "guard": {
                "audits": self.num_audits,
                "alarms": self.num_alarms,
                **{kind: self.event_counts[kind] for kind in _COUNTED},
            },
            "non_finite": self.num_non_finite,
            "config_digest": self.config_digest,
            "parties": [] if peers is None else [_describe_party(row) for row in peers.parties],
            "links": dict(self.link_bytes.most_common(64)),
            "claimed_links": [str(link)[:200] for link in _list_of(last.get("bytes_claimed"))[:64]],
            "phases": last.get("phases") if isinstance(last.get("phases"), dict) else {},
            "events": list(self.shown_events)[-80:],
            "security": self.security.read_counts(),
            "security_events": [asdict(event) for event in list(self.security_events)[-40:]],
            "logs": self.read_logs(),
        }


def _describe_party(row: Any) -> dict[str, Any]:
    audited = max(row.audits.values(), default=0)
    return {
        "name": printable_text(row.name, 80),
        "state": row.state_text,
        "steps": row.steps,
        "audits": audited,
        "bytes_from": row.bytes_from,
        "bytes_to": row.bytes_to,
        "heard": row.heard,
        "verdicts": [printable_text(verdict) for verdict in row.verdicts],
        "note": printable_text(row.note),
    }


def _count_of(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read_config(path: Path) -> Row:
    try:
        with open_run_file(path) as file:
            return tomllib.loads(file.read(_MAX_CONFIG_BYTES).decode("utf-8", "replace"))
    except (OSError, tomllib.TOMLDecodeError, RecursionError):
        return {}
