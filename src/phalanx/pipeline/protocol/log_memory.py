"""Workers' memory of their owner's audit log: to cut or rewrite it unnoticed, an attacker must reach them as well."""

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from phalanx.config import canonical_json, escape_controls
from phalanx.errors import CutLogError, FrameError, SignatureError
from phalanx.pipeline.protocol.signed import StatementReader, run_of_session
from phalanx.security.audit import MAX_BYTES, PublicEntries, PublicHead
from phalanx.security.crypto import Peer

Observe = Callable[[str, dict[str, object]], None]

_SESSION = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")
_WAY_OUT = (
    "it was truncated or replaced; restore the whole run directory, or begin a new run from one of its checkpoints "
    "with --from"
)


class LogHeadExchange:
    """The owner's side: the head of its audit log that workers are told, and a check of the heads that they remember.

    Args:
        lines: Public entries of the log; None where workers are told nothing, and their heads are not checked.
    """

    def __init__(self, lines: PublicEntries | None = None, owner: Peer | None = None) -> None:
        self._lines, self._owner = lines, owner

    def current_head(self) -> PublicHead | None:
        """The head that workers are told now."""
        return None if self._lines is None else self._lines.signed_public_head()

    def check_remembered_head(self, party: str, known: PublicHead | None, session: str, observe: Observe) -> None:
        """Compare the log with a head that a party says it was told; without the owner's signature it was not.

        Raises:
            CutLogError: It was told of a line that the log lacks.
        """
        owner = self._owner
        if known is None or self._lines is None or owner is None:
            return
        try:
            StatementReader(session, lambda name: owner).open_log_head(known)
        except (FrameError, SignatureError) as exc:
            observe("log_head_ignored", {"party": party, "error": type(exc).__name__, "reason": str(exc)})
            return
        try:
            self._lines.check_known_head(known, party)
        except CutLogError as exc:
            raise CutLogError(f"{exc}: {_WAY_OUT}") from exc


class LogMemory:
    """A worker's side: it keeps the newest head that the owner has told, beyond the end of its process.

    One file for each run and owner, at most `MAX_BYTES` long, written when there is nothing else to do.

    Args:
        directory: Directory of the memory; made when there is something to keep.
        statements: Opens the owner's messages of this session.

    Attributes:
        known: The head that was told last; None where none was.
    """

    def __init__(self, directory: Path, statements: StatementReader, owner: Peer) -> None:
        self.known_head: PublicHead | None = None
        self._statements = statements
        self._owner = owner
        self._pending_head: PublicHead | None = None
        self._path: Path | None = None
        self._is_kept = True
        if _SESSION.fullmatch(statements.session) is not None:
            # under the owner's key as well: no other party that claims to serve the run is told, or writes over it
            name = f"{run_of_session(statements.session)}-{owner.public_key.hex()[:16]}.json"
            self._path = directory / name
            self.known_head = self._read_head(self._path)

    def compare_head(self, told: PublicHead | None) -> None:
        """Take the owner's log head for a joining worker, and compare it with the remembered one.

        Raises:
            CutLogError: Its log ends before a line that is known here, or has another one in its place.
            FrameError, SignatureError: It is of another run, or not signed.
        """
        told = None if told is None else self._statements.open_log_head(told)
        newest = 0 if told is None else told.last.number
        due = None if self.known_head is None else self.known_head.required_entry(None if told is None else told.boot)
        differs = told is not None and due is not None and told.last.number == due.number and told.last != due
        if due is not None and (newest < due.number or differs):
            raise CutLogError(
                f"{self._owner.name}: its audit log has {newest} lines about sessions, steps and evictions, but "
                f"this worker has the same owner's signature for number {due.number} of this run; {_WAY_OUT}; to "
                f"serve the run anyway, remove {self._path}"
            )
        if told is not None:
            self.known_head, self._is_kept = told, False

    def take_head(self, told: PublicHead | None) -> None:
        """Take the owner's log head while the run is under way; it is checked when there is time."""
        if told is not None and told != self.known_head:
            self._pending_head = told

    def write_head(self) -> None:
        """Write down new signed heads; a disk that refuses is reported once."""
        head, self._pending_head = self._pending_head, None
        if head is not None and (self.known_head is None or head.last.number >= self.known_head.last.number):
            with contextlib.suppress(FrameError, SignatureError):
                self.known_head, self._is_kept = self._statements.open_log_head(head), False
        if self._is_kept or self.known_head is None or self._path is None:
            return
        self._is_kept = True
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_bytes(canonical_json(self.known_head.model_dump(mode="json")))
            os.replace(temporary, self._path)
        except OSError as exc:
            _print_warning(
                f"{self._path}: cannot be written ({exc.strerror}), so the head of the owner's audit log is not saved"
            )
            self._path = None

    def _read_head(self, path: Path) -> PublicHead | None:
        """Read the head that an earlier process kept; a file that is damaged, as after a crash, has none."""
        try:
            with path.open("rb") as file:
                head = PublicHead.model_validate_json(file.read(MAX_BYTES))
            return self._statements.open_log_head(head)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError, FrameError, SignatureError) as exc:
            _print_warning(
                f"{path}: cannot be read ({type(exc).__name__}), so the saved head of the owner's audit log is not used"
            )
            return None


def _print_warning(reason: str) -> None:
    # the log may lie on the same full disk
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{escape_controls(str(reason))}\n")
