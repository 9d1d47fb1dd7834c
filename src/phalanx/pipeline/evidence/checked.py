"""Evidence as an outsider reads it: certificates and signatures are checked before anything else is read."""

import hashlib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from phalanx.errors import CertificateError, EvidenceError, FrameError, PeerRefusedError, SignatureError
from phalanx.pipeline.evidence.files import EvidenceRecord, read_evidence
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import parse_message
from phalanx.pipeline.protocol.signed import Statement, StatementReader
from phalanx.security.crypto import Peer, certificate_facts, digest_hex, peer_from_certificate
from phalanx.transport import SignedHeader
from phalanx.transport.tensors import tensor_buffers

_Said = TypeVar("_Said", bound=Message)

ON_DISPLAY = ("message", "input")
"""Roles of headers that a forger showed: that no party signed them is what the verdict says."""


@dataclass(frozen=True)
class Pins:
    """The facts that a reader of evidence knows from elsewhere.

    Attributes:
        authority: PEM of the authority's certificate; None believes the one in the file.
        session: Name of the session; None believes the one in the file.
        in_run: Whether the reader is the run itself, which recomputes on its own device and threads.
    """

    authority: bytes | None = None
    session: str | None = None
    in_run: bool = False


@dataclass(frozen=True)
class CheckedEvidence:
    """One evidence file with digests, certificates and signatures that have been checked.

    Attributes:
        peers: The parties by name, with the keys that the authority certified.
        statements: Opens messages that parties passed on.
        headers: Headers by role, signed in this session by the party that they name as sender.
        unsigned: Roles of headers that no party signed in this session; only forgery may have any.
        fingerprint: SHA-256 over the authority's certificate, hex.
        pins: Facts that the reader knew beforehand.
    """

    where: str
    record: EvidenceRecord
    tensors: Mapping[str, Tensor]
    peers: Mapping[str, Peer]
    statements: StatementReader
    headers: Mapping[str, SignedHeader]
    unsigned: tuple[str, ...]
    fingerprint: str
    sha256: str
    pins: Pins

    def refusal_error(self, reason: str) -> EvidenceError:
        """Build the error that says what does not hold."""
        return EvidenceError(f"{self.where}: {reason}")

    def read_statement(self, role: str, kind: type[_Said]) -> Statement[_Said]:
        """Return the message in the header of this role, parsed strictly."""
        message = self.read_message(role)
        if not isinstance(message, kind):
            raise self.refusal_error(f"header {role!r} is a {message.kind!r} message, expected {kind.kind!r}")
        return Statement(message, self.headers[role])

    def read_message(self, role: str) -> Message:
        """Return the message in the header of this role, of whichever kind."""
        header = self.headers.get(role)
        if header is None:
            raise self.refusal_error(f"lacks the signed header for {role!r}, which its verdict needs")
        try:
            return parse_message(header.fields.kind, header.fields.body)
        except FrameError as exc:
            raise self.refusal_error(f"header {role!r}: {exc}") from exc

    def tensors_under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors with names that start with a prefix, by the rest of the name."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def digest_of(self, name: str) -> str | None:
        """BLAKE3 over the bytes of a tensor, None when it is not there."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        return digest_hex(tensor_buffers(tensor.contiguous()))


def open_evidence(path: Path, pins: Pins) -> CheckedEvidence:
    """Read evidence and check what does not depend on the verdict.

    Args:
        pins: Facts that the reader knows beforehand.

    Raises:
        EvidenceError: A file is missing, altered or malformed, a certificate is not the authority's, a
            header is not its sender's, or something is of another session.
    """
    record, tensors, sha256 = read_evidence(path, own=pins.in_run)
    fingerprint, peers = certified_peers(path, record, pins)
    statements = StatementReader(record.session, peer_lookup(peers))
    headers, unsigned = _open_headers(path, record, statements)
    return CheckedEvidence(str(path), record, tensors, peers, statements, headers, unsigned, fingerprint, sha256, pins)


@runtime_checkable
class VouchedRecord(Protocol):
    """What every record of evidence has: a session, and certificates with the authority's own."""

    @property
    def session(self) -> str:
        """Name that every header bears."""
        ...

    @property
    def authority(self) -> str:
        """PEM of the authority."""
        ...

    @property
    def certificates(self) -> Mapping[str, str]:
        """PEM of each party."""
        ...


def certified_peers(path: Path, record: VouchedRecord, pins: Pins) -> tuple[str, dict[str, Peer]]:
    """Compare authority and session with the reader's, and check every certificate.

    Returns:
        SHA-256 over the authority's certificate, hex, and the parties by name.
    """
    fingerprint = _certificate_fingerprint(record.authority.encode(), f"{path}: authority")
    if pins.authority is not None:
        known_fingerprint = _certificate_fingerprint(pins.authority, "the authority to compare with")
        if known_fingerprint != fingerprint:
            raise EvidenceError(f"{path}: was certified by the authority {fingerprint}, expected {known_fingerprint}")
    if pins.session not in (None, record.session):
        raise EvidenceError(f"{path}: belongs to the session {record.session!r}, expected {pins.session!r}")
    return fingerprint, {name: _certified_peer(path, record, name) for name in sorted(record.certificates)}


def peer_lookup(peers: Mapping[str, Peer]) -> Callable[[str], Peer]:
    """Return what looks a party up; it raises `PeerRefusedError` for one without a certificate."""

    def peer(name: str) -> Peer:
        if name not in peers:
            raise PeerRefusedError(f"{name[:80]!r} has no certificate in it")
        return peers[name]

    return peer


def _open_headers(
    path: Path, record: EvidenceRecord, statements: StatementReader
) -> tuple[dict[str, SignedHeader], tuple[str, ...]]:
    headers, unsigned = {}, []
    for role, signed in sorted(record.headers.items()):
        try:
            headers[role] = statements.open_frame_header(signed, (None, None))
        except (FrameError, SignatureError) as exc:
            if record.verdict.offence != "forgery" or role not in ON_DISPLAY:
                raise EvidenceError(f"{path}: header {role!r} is invalid: {exc}") from exc
            unsigned.append(role)
    return headers, tuple(unsigned)


def _certified_peer(path: Path, record: VouchedRecord, name: str) -> Peer:
    place = f"{path}: certificate of {name[:80]!r}"
    pem = record.certificates[name].encode()
    try:
        # as of its first day: evidence outlives certificates
        since = certificate_facts(pem, place).not_before
        peer = peer_from_certificate(pem, record.authority.encode(), since, place)
    except CertificateError as exc:
        raise EvidenceError(str(exc)) from exc
    try:
        return peer.with_session_name(name)
    except CertificateError as exc:
        raise EvidenceError(f"{place}: belongs to {peer.name!r}") from exc


def _certificate_fingerprint(pem: bytes, where: str) -> str:
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii").strip())).hexdigest()
    except ValueError as exc:
        raise EvidenceError(f"{where}: not a PEM certificate") from exc
