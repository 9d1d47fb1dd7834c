"""The signed report of an incident: the operator's actions, and the request log of the time around them.

ACCESS_DIR/incidents/ID/report.json is one canonical JSON object, ``{"signature": HEX, "statement": {...}}``, and
report.md the same for people. It names keys, owners, counts and verdicts; a request's text is in no log.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json, printable_text
from phalanx.errors import SignatureError, VerificationError
from phalanx.security.audit import LogEntry
from phalanx.security.crypto import Peer, in_domain, parse_canonical, read_public_signer, replace_file, steady_now
from phalanx.serve.access import LOG_FOLDER, SERVER_FILE, verify_request_log
from phalanx.serve.access.request_log import log_files
from phalanx.serve.incident.case import IncidentCase

REPORT_FILE, PAGE_FILE = "report.json", "report.md"
_DOMAIN = "incident-report/1"
_MAX_ENTRIES = 2000
_MAX_REPORT_BYTES = 32 * 1024 * 1024
_REQUEST = "request"


@dataclass
class _KeyTotals:
    """What one key did in the time of the report."""

    owner: str = ""
    requests: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)

    def add_request(self, body: dict[str, Any]) -> None:
        self.owner = str(body["owner"])
        self.requests += 1
        self.tokens.update({str(name): int(count) for name, count in body["sizes"].items()})
        self.statuses[str(body["status"])] += 1
        self.verdicts.update(map(str, body["verdicts"]))

    def describe(self, key: str) -> dict[str, Any]:
        return {
            "key": key,
            "owner": self.owner,
            "requests": self.requests,
            "sizes": dict(sorted(self.tokens.items())),
            "statuses": dict(sorted(self.statuses.items())),
            "verdicts": dict(sorted(self.verdicts.items())),
        }


class _LogReader:
    """Takes the lines of the request log that belong into a report."""

    def __init__(self, since: datetime, keys: frozenset[str]) -> None:
        self._since, self._keys = since, keys
        self.entries: list[dict[str, Any]] = []
        self.totals: dict[str, _KeyTotals] = {}
        self.models: Counter[str] = Counter()
        self.num_left_out = 0
        self.head = ""

    def take_line(self, line: LogEntry) -> None:
        """Take one line that was checked."""
        self.head = line.head.digest
        if datetime.fromisoformat(line.time) < self._since:
            return
        if line.kind == _REQUEST:
            key = str(line.body["key"])
            self.totals.setdefault(key, _KeyTotals()).add_request(line.body)
            self.models[str(line.body["model"])] += 1
            if key not in self._keys:
                return
        if len(self.entries) < _MAX_ENTRIES:
            self.entries.append({"time": line.time, "source": "server", "kind": line.kind, **line.body})
        else:
            self.num_left_out += 1


def write_report(case: IncidentCase, hours: int = 24) -> dict[str, Any]:
    """Write the report of an incident and return its statement.

    Args:
        hours: Hours before the incident was opened that the time line begins.

    Raises:
        AuditLogError: A log does not hold: a report on it would be worth nothing.
    """
    actions = case.read_actions()
    since = datetime.fromisoformat(actions[0].time) - timedelta(hours=hours)
    keys = frozenset(str(line.body["key"]) for line in actions if "key" in line.body)
    server = read_public_signer(case.access / SERVER_FILE) if (case.access / SERVER_FILE).exists() else None
    reader = _LogReader(since, keys)
    num_lines = 0
    if server is not None and log_files(case.access / LOG_FOLDER):
        num_lines = sum(verify_request_log(case.access / LOG_FOLDER, server, reader.take_line).values())
    done = [{"time": line.time, "source": "operator", "kind": line.kind, **line.body} for line in actions]
    statement = {
        "incident": case.incident,
        "title": actions[0].body["title"],
        "written": f"{steady_now():%Y-%m-%dT%H:%M:%SZ}",
        "since": since.astimezone(UTC).isoformat(),
        "time_line": sorted([*done, *reader.entries], key=lambda entry: str(entry["time"])),
        "left_out": reader.num_left_out,
        "keys": [totals.describe(key) for key, totals in sorted(reader.totals.items())],
        "models": dict(sorted(reader.models.items())),
        "request_log": {
            "lines": num_lines,
            "head": reader.head,
            "server_key": "" if server is None else server.public_key.hex(),
        },
        "incident_log": {"lines": len(actions), "head": actions[-1].head.digest},
    }
    signature = case.identity.sign_data(in_domain(_DOMAIN, canonical_json(statement))).hex()
    replace_file(case.directory / REPORT_FILE, canonical_json({"signature": signature, "statement": statement}), 0o640)
    replace_file(case.directory / PAGE_FILE, _write_page(statement).encode(), 0o640)
    return statement


def verify_report(path: Path, operator: Peer) -> dict[str, Any]:
    """Check the signature of a report and return its statement."""
    try:
        with path.open("rb") as file:
            envelope = parse_canonical(file.read(_MAX_REPORT_BYTES))
        statement: dict[str, Any] = envelope["statement"]
        operator.verify_signature(bytes.fromhex(envelope["signature"]), in_domain(_DOMAIN, canonical_json(statement)))
    except (OSError, ValueError, KeyError, TypeError, SignatureError) as exc:
        raise VerificationError(f"{path}: is no report that {operator.name} has signed ({exc})") from exc
    return statement


def _write_page(statement: dict[str, Any]) -> str:
    lines = [
        f"# Incident {statement['incident']}: {statement['title']}",
        "",
        f"Written {statement['written']}; the time line begins at {statement['since']}.",
        f"Request log: {statement['request_log']['lines']} lines, each signed, in order and unchanged.",
        "",
        "## Time line",
        "",
        "| time | source | what | facts |",
        "|---|---|---|---|",
    ]
    for entry in statement["time_line"]:
        facts = {name: value for name, value in entry.items() if name not in {"time", "source", "kind"}}
        text = printable_text(json.dumps(facts, ensure_ascii=True), 400).replace("|", "\\|")
        lines.append(f"| {entry['time']} | {entry['source']} | {entry['kind']} | {text} |")
    lines += [f"{statement['left_out']} further entries are left out.", ""] if statement["left_out"] else [""]
    lines += ["## Keys", "", "| key | owner | requests | statuses | verdicts |", "|---|---|---|---|---|"]
    for row in statement["keys"]:
        cells = [row["key"], row["owner"], row["requests"], json.dumps(row["statuses"]), json.dumps(row["verdicts"])]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
