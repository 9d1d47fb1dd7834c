"""Evidence as an outsider reads it: whose certificates hold, and which headers were really signed."""

import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from phalanx.errors import CertificateError, EvidenceError, FrameError, SignatureError
from phalanx.pipeline.evidence import EvidenceRecord, read_evidence
from phalanx.pipeline.message import Message
from phalanx.pipeline.messages import Signed, parse_message
from phalanx.pipeline.signed import open_signed, unverified_field
from phalanx.security.crypto import Peer, certificate_facts, digest_hex, peer_from_certificate
from phalanx.transport import SignedHeader
from phalanx.transport.tensors import tensor_buffers

_Said = TypeVar("_Said", bound=Message)

ON_DISPLAY = ("message", "input")
"""Headers that a forger showed: that nobody signed them is what the verdict says."""


@dataclass(frozen=True)
class Hearing:
    """One evidence file whose digests, certificates and signatures have been checked.

    Attributes:
        where: How errors call it.
        record: What it says.
        tensors: What lies beside it.
        peers: The parties by name, as the authority vouches for them.
        headers: Headers by role, signed by whom they name as sender.
        unsigned: Roles of headers that their sender did not sign; only forgery may have any.
        fingerprint: SHA-256 over the authority's certificate, hex.
        sha256: Of the record's file.
    """

    where: str
    record: EvidenceRecord
    tensors: Mapping[str, Tensor]
    peers: Mapping[str, Peer]
    headers: Mapping[str, SignedHeader]
    unsigned: tuple[str, ...]
    fingerprint: str
    sha256: str

    def refuse(self, reason: str) -> EvidenceError:
        """Build the error that says what does not hold."""
        return EvidenceError(f"{self.where}: {reason}")

    def said(self, role: str, kind: type[_Said]) -> tuple[_Said, SignedHeader]:
        """What a header of this role says, parsed strictly.

        Raises:
            EvidenceError: It is missing, of another kind or malformed.
        """
        header = self.headers.get(role)
        if header is None:
            raise self.refuse(f"has no signed header for {role!r}, which its verdict rests on")
        try:
            message = parse_message(header.fields.kind, header.fields.body)
        except FrameError as exc:
            raise self.refuse(f"header {role!r}: {exc}") from exc
        if not isinstance(message, kind):
            raise self.refuse(f"header {role!r} is a {message.kind!r} message, expected {kind.kind!r}")
        return message, header

    def digest_of(self, name: str) -> str | None:
        """BLAKE3 over the bytes of a tensor, None when it is not there."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        return digest_hex(tensor_buffers(tensor.contiguous()))


def open_hearing(path: Path, authority: Path | None) -> Hearing:
    """Read evidence and check what does not depend on the verdict.

    Args:
        path: The JSON file.
        authority: The authority's certificate as its reader knows it; None believes the one in the file.

    Raises:
        EvidenceError: A file is missing, altered or malformed, a certificate is not the authority's, a
            header is not its sender's, or headers of two runs are mixed.
    """
    record, tensors, sha256 = read_evidence(path)
    fingerprint = _fingerprint(record.authority.encode(), f"{path}: authority")
    if authority is not None:
        try:
            known = _fingerprint(authority.read_bytes(), str(authority))
        except OSError as exc:
            raise EvidenceError(f"{authority}: cannot be read ({exc.strerror})") from exc
        if known != fingerprint:
            raise EvidenceError(
                f"{path}: is vouched for by the authority {fingerprint}, expected {known} of {authority}"
            )
    peers = {name: _peer(path, record, name) for name in sorted(record.certificates)}
    headers, unsigned = _open_headers(path, record, peers)
    runs = {header.fields.run for header in headers.values()}
    if len(runs) > 1:
        raise EvidenceError(f"{path}: mixes headers of {len(runs)} sessions; evidence is from one")
    return Hearing(str(path), record, tensors, peers, headers, unsigned, fingerprint, sha256)


def _open_headers(
    path: Path, record: EvidenceRecord, peers: Mapping[str, Peer]
) -> tuple[dict[str, SignedHeader], tuple[str, ...]]:
    headers, unsigned = {}, []
    for role, signed in sorted(record.headers.items()):
        try:
            headers[role] = _opened(signed, peers)
        except (FrameError, SignatureError) as exc:
            if record.verdict.offence != "forgery" or role not in ON_DISPLAY:
                raise EvidenceError(f"{path}: header {role!r} does not hold: {exc}") from exc
            unsigned.append(role)
    return headers, tuple(unsigned)


def _opened(signed: Signed, peers: Mapping[str, Peer]) -> SignedHeader:
    sender = unverified_field(signed, "sender")
    if not isinstance(sender, str) or sender not in peers:
        raise SignatureError(f"its sender {str(sender)[:80]!r} has no certificate here")
    return open_signed(signed, peers[sender])


def _peer(path: Path, record: EvidenceRecord, name: str) -> Peer:
    where = f"{path}: certificate of {name[:80]!r}"
    pem = record.certificates[name].encode()
    try:
        # as of its first day: evidence outlives certificates
        since = certificate_facts(pem, where).not_before
        peer = peer_from_certificate(pem, record.authority.encode(), since, where)
    except CertificateError as exc:
        raise EvidenceError(str(exc)) from exc
    try:
        return peer.called(name)
    except CertificateError as exc:
        raise EvidenceError(f"{where}: is that of {peer.name!r}") from exc


def _fingerprint(pem: bytes, where: str) -> str:
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii").strip())).hexdigest()
    except ValueError as exc:
        raise EvidenceError(f"{where}: is no PEM certificate") from exc
