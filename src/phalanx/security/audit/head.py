"""Signed heads of a log, kept in other places: a log that lacks the line of a known head was cut or replaced."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import AuditLogError, SignatureError
from phalanx.security.audit.line import LogHead
from phalanx.security.crypto import Identity, Peer, in_domain

_DOMAIN = "log-head/1"

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class HeadEntry(StrictModel):
    """A head inside something that is signed as a whole.

    Attributes:
        digest: Digest of the last one.
    """

    num_events: Annotated[int, Field(ge=0, le=2**63 - 1)]
    digest: Digest

    @property
    def log_head(self) -> LogHead:
        """The same as the log has it."""
        return LogHead(self.num_events, self.digest)


class SignedHead(HeadEntry):
    """A head that stands alone.

    Attributes:
        signature: Its owner's, over all of it.
        ml_dsa_44: The same by the owner's second key; None where it has none.
    """

    run: str
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}\z")]
    ml_dsa_44: Annotated[str, Field(pattern=r"^[0-9a-f]{4840}\z")] | None = None


@dataclass(frozen=True)
class KnownHead:
    """A head that a log must contain."""

    head: LogHead
    where: str


def sign_head(identity: Identity, run: str, head: LogHead) -> dict[str, Any]:
    """Return a signed head, as JSON data, that every holder of the owner's public key can check."""
    statement = {"run": run, "num_events": head.num_events, "digest": head.digest}
    return {**statement, **identity.signature_fields(in_domain(_DOMAIN, canonical_json(statement)))}


def read_head(content: Any, peer: Peer, run: str | None, where: str) -> LogHead:
    """Check a signed head.

    Args:
        run: The run that it must be of; None accepts any.
    """
    try:
        signed = SignedHead.model_validate(content)
        statement = signed.model_dump(exclude={"signature", "ml_dsa_44"})
        peer.verify_fields(signed.model_dump(), in_domain(_DOMAIN, canonical_json(statement)))
    except (ValidationError, SignatureError) as exc:
        raise AuditLogError(f"{where}: holds no head of an audit log that {peer.name!r} signed") from exc
    if run is not None and signed.run != run:
        raise AuditLogError(f"{where}: holds the head of run {signed.run[:80]!r}, expected {run!r}")
    return signed.log_head


def write_signed_head(path: Path, signed: dict[str, Any]) -> None:
    """Put a signed head into a file of its own, in the place of an older one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(canonical_json(signed))
    os.replace(temporary, path)


class KnownHeads:
    """A comparison of a log, line by line, with the heads that others know."""

    def __init__(self, path: Path, known: Iterable[KnownHead]) -> None:
        self._path = path
        self._waiting = sorted(known, key=lambda one: one.head.num_events)

    def compare_head(self, head: LogHead) -> None:
        """Compare the head after one more line."""
        while self._waiting and self._waiting[0].head.num_events <= head.num_events:
            expected = self._waiting.pop(0)
            if expected.head.num_events == head.num_events and expected.head.digest != head.digest:
                raise AuditLogError(
                    f"{self._path}: line {head.num_events} is not the one that {expected.where} knows; "
                    "put back the log that belongs to it"
                )

    def check_log_end(self, num_events: int) -> None:
        """Compare the end of the log."""
        if self._waiting:
            expected = self._waiting[-1]
            missing = expected.head.num_events - num_events
            raise AuditLogError(
                f"{self._path}: {'line' if missing == 1 else 'lines'} {num_events + 1}"
                f"{'' if missing == 1 else f' to {expected.head.num_events}'} "
                f"{'is' if missing == 1 else 'are'} missing: "
                f"the log ends after {num_events} events, {expected.where} knows {expected.head.num_events}; "
                "put the whole log back"
            )
