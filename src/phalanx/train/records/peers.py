"""The parties of a run seen from outside: what its directory and its authority hold, whether it is under way or not."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config import printable_text
from phalanx.errors import ConfigError
from phalanx.pipeline.config import OWNER
from phalanx.security.crypto import RevokedParties
from phalanx.security.invite import Invitations
from phalanx.telemetry.parties import LATE_S, LONGEST_TEXT, PEERS_FILE, PartiesStatus, PartyRow, read_peers
from phalanx.train.config import load_run
from phalanx.train.records.run_directory import default_directory


@dataclass(frozen=True)
class PeersView:
    """The parties of a run, or of an authority that has no run yet.

    Attributes:
        status: Last status that the owner wrote; None where no session has begun.
        rows: All parties: those of the status, and invited, certified or revoked ones.
    """

    pki: Path
    status: PartiesStatus | None
    rows: tuple[PartyRow, ...]

    def describe_progress(self, now: float) -> str:
        """Return in words how far the run is, and how old that is."""
        status = self.status
        if status is None:
            return "no session has started"
        age_s = max(0, int(now - status.written))
        if status.ended:
            going = "not under way"
        elif age_s > LATE_S:
            going = f"no sign of the owner for {age_s} s: it has crashed or hangs"
        else:
            going = "under way"
        return f"{printable_text(status.run)}: step {status.step} of {status.steps}, {going}"

    def to_json(self, now: float) -> dict[str, Any]:
        """Return everything as JSON data."""
        status = self.status
        session_facts = None if status is None else status.model_dump(mode="json", exclude={"parties", "version"})
        late = status is not None and not status.ended and now - status.written > LATE_S
        rows = [json.loads(row.model_dump_json()) for row in self.rows]
        return {"session": session_facts, "owner_is_silent": late, "parties": rows}


def look_at_peers(target: Path, clock: Callable[[], float] = time.time) -> PeersView:
    """Return the parties of a run directory, a run file or a directory of an authority."""
    pki, run_dir = _find_directories(target)
    status = None if run_dir is None else read_peers(run_dir / PEERS_FILE)
    rows = {} if status is None else {row.name: row for row in status.parties}
    for path in sorted(pki.glob("*/certificate.pem")):
        name = path.parent.name
        if name != OWNER:
            rows.setdefault(name, PartyRow(name=name, state="certified"))
    for name in Invitations(pki).open_names():
        rows.setdefault(name, PartyRow(name=name, state="invited"))
    for name, entry in RevokedParties(pki).read_revocations().items():
        row = rows.get(name, PartyRow(name=name, state="revoked"))
        why = printable_text(entry.reason, LONGEST_TEXT)
        rows[name] = row.model_copy(update={"state": "revoked", "note": why, "since": entry.time, "since_step": None})
    view = PeersView(pki, status, tuple(rows[name] for name in sorted(rows)))
    # a session that is over has nobody at work
    return view if status is None or not status.ended else replace(view, rows=tuple(map(_resting_row, view.rows)))


def _resting_row(row: PartyRow) -> PartyRow:
    if row.state not in ("waiting", "connected", "serving", "shadowing"):
        return row
    return row.model_copy(update={"state": "certified"})


def _find_directories(target: Path) -> tuple[Path, Path | None]:
    """Return the directory of the authority, and that of the run where there is one."""
    if (target / "authority.pem").exists():
        return target, None
    is_run_dir = (target / "config.toml").exists()
    if not (is_run_dir or target.is_file()):
        raise ConfigError(f"{target}: expected a run directory, a run file or a pki directory")
    run = load_run(target / "config.toml" if is_run_dir else target)
    run_dir = target if is_run_dir else default_directory(run)
    pki = run_dir / "pki" if run.pki is None else Path(run.pki)
    if not (pki / "authority.pem").exists():
        raise ConfigError(
            f"{target}: has no parties with certificates yet; `phalanx invite` makes {pki / 'authority.pem'}"
        )
    return pki, run_dir
