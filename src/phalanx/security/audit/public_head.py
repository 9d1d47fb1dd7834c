"""Public heads: the owner tells workers how far its log has come, and they keep it where the owner's disk ends."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import AuditLogError, CutLogError
from phalanx.security.audit.head import Digest
from phalanx.security.audit.leaves import STEP
from phalanx.security.crypto import Identity, Peer, boot_name, digest_hex, in_domain

PUBLIC_KINDS = frozenset({"run_started", "run_resumed", STEP, "evicted", "run_completed"})
"""Kinds of lines that every worker knows of anyway. All others are not counted before workers: their number would
tell a liar when the guard has begun to suspect it."""

MAX_BYTES = 4096
"""Of a file that keeps a head; nothing beyond is read."""

_HEAD_DOMAIN, _BOOT_DOMAIN = "log-public-head/1", "log-boot/1"


class PublicEntry(StrictModel):
    """A line of a public kind.

    Attributes:
        number: Its number among these, from 1.
    """

    number: Annotated[int, Field(ge=1, le=2**53)]
    digest: Digest


class PublicHead(StrictModel):
    """The last public line of a log, signed by the log's owner.

    Attributes:
        forced: The last one that was on the disk for certain; None where none was.
        boot: Name of the boot of the owner's machine, hashed with the run: as long as it lasts, `last` is there too.
    """

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\z")]
    last: PublicEntry
    forced: PublicEntry | None
    boot: Digest | None
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}\z")]

    def check_owner_signature(self, owner: Peer) -> None:
        """Return when `owner` signed it."""
        owner.verify_signature(bytes.fromhex(self.signature), _signed_part(self))

    def required_entry(self, boot: str | None) -> PublicEntry | None:
        """The last line that the log must still have, after whatever honest crash; None where it need have none.

        Args:
            boot: Name of the current boot of the owner's machine, hashed as in the record.
        """
        return self.last if boot is not None and self.boot == boot else self.forced


class PublicEntries:
    """The public lines of one log, from which the heads for workers are made."""

    def __init__(self, identity: Identity, run: str) -> None:
        self._identity, self._run = identity, run
        self._digests: list[str] = []
        self._num_forced = 0
        self._last_head: PublicHead | None = None
        self._boot = hashed_boot(run, boot_name())

    def __len__(self) -> int:
        return len(self._digests)

    def count_entry(self, kind: str, digest: str) -> None:
        """Count a line that was written or read."""
        if kind in PUBLIC_KINDS:
            self._digests.append(digest)

    def note_forced(self, number: int) -> None:
        """Note that the first `number` of them are on the disk."""
        self._num_forced = number

    def signed_public_head(self) -> PublicHead | None:
        """Present end of the log, for workers; None while it has no public line."""
        last, forced = self._public_entry(len(self._digests)), self._public_entry(self._num_forced)
        if last is None:
            return None
        if self._last_head is None or (self._last_head.last, self._last_head.forced) != (last, forced):
            head = PublicHead(run=self._run, last=last, forced=forced, boot=self._boot, signature="0" * 128)
            signature = self._identity.sign_data(_signed_part(head)).hex()
            self._last_head = head.model_copy(update={"signature": signature})
        return self._last_head

    def check_known_head(self, known: PublicHead, where: str) -> None:
        """Compare the log with a head that its owner has signed."""
        lack = describe_missing_entry(self._digests, known.required_entry(self._boot), where)
        if lack is not None:
            raise CutLogError(f"the audit log {lack}, by this owner's signature")

    def _public_entry(self, number: int) -> PublicEntry | None:
        is_there = 0 < number <= len(self._digests)
        return PublicEntry(number=number, digest=self._digests[number - 1]) if is_there else None


def describe_missing_entry(digests: Sequence[str], due: PublicEntry | None, where: str) -> str | None:
    """Describe the missing line of a log that must contain a known line; None where nothing is missing.

    Args:
        due: The line; None where none must be there.
    """
    if due is None or digests[due.number - 1 : due.number] == [due.digest]:
        return None
    if due.number > len(digests):
        return f"has {len(digests)} of the {due.number} lines about sessions, steps and evictions that {where} knows of"
    return f"has another line than {where} knows as number {due.number} about sessions, steps and evictions"


def read_public_head(path: Path, owner: Peer) -> PublicHead:
    """Read a worker's copy of the head of a log."""
    try:
        with path.open("rb") as file:
            head = PublicHead.model_validate_json(file.read(MAX_BYTES))
    except OSError as exc:
        raise AuditLogError(f"{path}: cannot be read ({exc.strerror}); give a file of a worker's log_heads") from exc
    except ValidationError as exc:
        raise AuditLogError(f"{path}: is not a head that a worker has kept; give a file of its log_heads") from exc
    head.check_owner_signature(owner)
    return head


def hashed_boot(run: str, name: str | None) -> str | None:
    """Return a boot's name in heads of a run: equal names can be compared, and no machine is recognised."""
    return None if name is None else digest_hex(in_domain(_BOOT_DOMAIN, canonical_json([run, name])))


def _signed_part(head: PublicHead) -> bytes:
    return in_domain(_HEAD_DOMAIN, canonical_json(head.model_dump(mode="json", exclude={"signature"})))
