"""The invited machine's side: keys are made here, and only their public halves leave."""

import hmac
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from phalanx.config import printable_text
from phalanx.errors import CertificateError, FrameError, PeerGoneError, PeerLostError, PeerRefusedError
from phalanx.security.crypto import (
    certificate_fingerprint,
    load_identity,
    make_request,
    peer_from_certificate,
    seal_for,
    steady_now,
    tls_server_name,
    write_public,
)
from phalanx.security.invite.line import EXCHANGE_S, client_context, read_text_field, receive_object, send_object
from phalanx.security.invite.token import JoinToken, secret_purpose, split_address

_OWNER = "owner"
_MAX_SKEW_S = 240
"""Certificates begin five minutes before they are made; beyond that parties refuse each other."""
_MAX_ASKS = 20


@dataclass(frozen=True)
class JoinAnswer:
    """The owner's message to an invited machine that is certified.

    Attributes:
        owner: ``host:port`` of the owner during the run.
        asks: Tasks that the machine will be asked to do, in lines for people; claims of the owner.
        own_host: The address of this machine on the way to the owner.
        skew_s: Seconds that this machine's clock is ahead of the owner's.
        needs_mib: Memory that the largest stage takes; 0 where the owner does not say.
        run: The run file of a split, which its parties agree to by taking part; empty for a worker.
    """

    owner: str
    asks: tuple[str, ...]
    own_host: str
    skew_s: int
    needs_mib: int = 0
    run: str = ""


@dataclass(frozen=True)
class JoinOffer:
    """An invited machine's description of itself; to the owner all but the address is a claim for people.

    Attributes:
        port: Port at which the machine will be reached; an `ReachabilityListener` answers there now.
        advertise: The name or address beside it; None for the one by which it reaches the owner.
        free_mib: Memory that it can give to stages; None where it does not know.
        gflops: Measured speed of its processor on a stage's kernels, in billions of operations a second.
    """

    port: int
    advertise: str | None = None
    free_mib: int | None = None
    gflops: int | None = None

    def question_fields(self, own_host: str) -> dict[str, str | int]:
        """Return it as part of the question."""
        host = self.advertise or own_host
        claims = {"free_mib": self.free_mib, "gflops": self.gflops}
        claims_made = {name: value for name, value in claims.items() if value is not None}
        return {"reach": f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}", **claims_made}


def enrol_machine(token: JoinToken, home: Path, offer: JoinOffer | None = None) -> JoinAnswer:
    """Make keys in a directory, or reuse existing ones, and have them certified.

    The first connection checks no certificate and asks for the authority's, which the fingerprint in the token proves;
    the second one trusts that authority alone, and only there the secret is told.

    Args:
        home: Directory of the keys; gets ``certificate.pem`` and ``authority.pem`` beside them.
        offer: Address at which this machine will be reached; the owner probes it first. None skips the probe.

    Raises:
        PeerGoneError: Nothing listens at the address.
        PeerLostError: No whole answer came.
        PeerRefusedError: The owner refuses, and why; or another than the owner answers.
        CertificateError: Another authority answers, the answer does not fit these keys, or a clock is wrong.
        FrameError: The answer is malformed.
    """
    with _connect_tls(token.address, None, None) as stranger:
        greeting = _ask_owner(stranger, {"ask": "authority"})
        authority = read_text_field(greeting, "authority").encode()
    if not hmac.compare_digest(certificate_fingerprint(authority, f"authority at {token.address}"), token.authority):
        raise CertificateError(
            f"{token.address}: has another authority than the token names; something else listens there, or somebody "
            "stands between"
        )
    request = make_request(home, token.name, token.authority)
    with _connect_tls(token.address, authority, _OWNER) as connection:
        _check_owner(connection, authority, token.address)
        own_host = str(connection.getsockname()[0])
        sealed = _seal_secret(token, read_text_field(greeting, "seal"))
        question = {"name": token.name, "sealed": sealed, "request": request.decode("ascii")}
        answer = _ask_owner(connection, question | ({} if offer is None else offer.question_fields(own_host)))
    if "refused" in answer:
        raise PeerRefusedError(
            f"the owner at {token.address} refuses: {printable_text(read_text_field(answer, 'refused'))}"
        )
    certificate = read_text_field(answer, "certificate").encode()
    peer = peer_from_certificate(certificate, authority, where="certificate that came")
    if peer.name != token.name:
        raise CertificateError(f"certificate that came: is of {peer.name!r}, expected {token.name!r}")
    write_public(home / "authority.pem", authority)
    write_public(home / "certificate.pem", certificate)
    # refuses a certificate of other keys than those that were made here
    load_identity(home)
    return _read_terms(answer, token, own_host)


def _seal_secret(token: JoinToken, seal_key: str) -> str:
    """Seal the secret for the owner: a later quantum computer that opens the recorded TLS session does not read it.

    Nobody has vouched for the key yet. Whoever exchanged it gets nothing: the secret goes to the owner alone, who then
    cannot open it.
    """
    try:
        return seal_for(bytes.fromhex(seal_key), token.secret.encode("ascii"), secret_purpose(token.name)).hex()
    except ValueError as exc:
        raise FrameError(f"{token.address}: its key to seal for is malformed") from exc


def _read_terms(answer: dict[str, Any], token: JoinToken, own_host: str) -> JoinAnswer:
    port, needs_mib = answer.get("port"), answer.get("needs_mib", 0)
    owners_time, asks = answer.get("time"), answer.get("asks")
    if not (_is_number(port) and _is_number(owners_time) and _is_number(needs_mib)) or not isinstance(asks, list):
        raise FrameError(f"{token.address}: its answer is malformed")
    if not 1 <= port <= 65535 or not isinstance(answer.get("run", ""), str):
        raise FrameError(f"{token.address}: its answer is malformed")
    skew_s = int(steady_now().timestamp()) - owners_time
    if abs(skew_s) > _MAX_SKEW_S:
        raise CertificateError(
            f"this machine's clock is {abs(skew_s)} s {'ahead of' if skew_s > 0 else 'behind'} the owner's; set it and "
            "join again, with the same token"
        )
    lines = tuple(printable_text(text) for text in asks[:_MAX_ASKS] if isinstance(text, str))
    host = token.address.rpartition(":")[0]
    return JoinAnswer(f"{host}:{port}", lines, own_host, skew_s, needs_mib, answer.get("run", ""))


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int


def _connect_tls(address: str, authority: bytes | None, party: str | None) -> ssl.SSLSocket:
    host, port = split_address(address)
    try:
        plain = socket.create_connection((host, port), timeout=EXCHANGE_S)
    except ConnectionRefusedError as exc:
        raise PeerGoneError(f"{address}: nothing listens there; is the owner's `phalanx invite` running?") from exc
    except OSError as exc:
        raise PeerLostError(f"{address}: cannot be reached ({exc})") from exc
    try:
        name = None if party is None else tls_server_name(party)
        return client_context(authority).wrap_socket(plain, server_hostname=name)
    except ssl.SSLCertVerificationError as exc:
        plain.close()
        raise PeerRefusedError(f"{address}: is not the owner of this authority ({exc.verify_message})") from exc
    except OSError as exc:
        plain.close()
        raise PeerLostError(f"{address}: no TLS 1.3 connection ({exc})") from exc


def _check_owner(connection: ssl.SSLSocket, authority: bytes, address: str) -> None:
    der = connection.getpeercert(binary_form=True) or b""
    peer = peer_from_certificate(ssl.DER_cert_to_PEM_cert(der).encode(), authority, where=f"certificate at {address}")
    if peer.name != _OWNER:
        raise PeerRefusedError(f"{address}: {peer.name!r} answers, expected {_OWNER!r}")


def _ask_owner(connection: ssl.SSLSocket, question: dict[str, Any]) -> dict[str, Any]:
    send_object(connection, question)
    return receive_object(connection, time.monotonic() + EXCHANGE_S)
