"""The owner's enrolment endpoint: it answers invited machines, and is of no use to others."""

import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from phalanx.closing import Closeable
from phalanx.config import printable_text
from phalanx.errors import (
    CertificateError,
    ConfigError,
    FrameError,
    PeerRefusedError,
    PhalanxError,
    SignatureError,
    TransportError,
)
from phalanx.security.crypto import HybridSealKey, load_authority, load_identity, read_public, steady_now
from phalanx.security.invite.line import EXCHANGE_S, read_text_field, receive_object, send_object, server_context
from phalanx.security.invite.lobby import ConnectionServer, ServedConnection
from phalanx.security.invite.reachability import probe_reachability
from phalanx.security.invite.register import Invitations
from phalanx.security.invite.token import secret_purpose

_MAX_VISITORS = 64
_MAX_PROBES, _PROBE_WINDOW_S = 5, 60.0
_MAX_LINES = 1000
_MAX_CLAIMED = 10**9


@dataclass(frozen=True)
class JoinTerms:
    """The terms under which a machine joins.

    Attributes:
        needs_mib: Memory of the largest stage with all that the guard asks of it; 0 where that is not known.
        run: The run file that every party of a split agrees to; empty for a worker, which needs none.
    """

    port: int
    asks: tuple[str, ...] = ()
    needs_mib: int = 0
    run: str = ""


class EnrolmentServer(Closeable):
    """The endpoint that gives invited machines their certificates, in threads of its own.

    Args:
        directory: Directory of the authority, with the owner's identity in ``owner``.
        say: Takes a line about each that came or was refused; called from other threads.

    Guarantees:
        TLS 1.3. Nothing but the authority's certificate is told without the secret of an invitation. A caller gets ten
        seconds and 16 KiB; what others do at its address costs it nothing, and idle connections make room for it
        (`ConnectionServer`). A secret has 256 bits, so wrong ones need no bound. The owner probes reachability only
        for a caller with the secret of an invitation, at most five failed ones a minute and name. Each refusal is
        printed once, of at most 1,000. No bytes from outside end the server.
    """

    def __init__(
        self,
        directory: Path,
        invitations: Invitations,
        terms: JoinTerms,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # checks dates, modes and that the keys belong to the certificate
        load_identity(directory / "owner")
        self._authority = load_authority(directory / "authority.pem").decode("ascii")
        self._context = server_context(directory / "owner")
        self._seal_key = HybridSealKey.generate()
        self._invitations, self._terms, self._say, self._clock = invitations, terms, say, clock
        self._failed_probes: dict[str, deque[float]] = {}
        self._told_refusals: set[str] = set()
        self._lock = threading.Lock()
        self._server: ConnectionServer | None = None
        self.port = 0

    def start_listening(self, bind: str, port: int) -> Self:
        """Begin to answer."""
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            listener = socket.create_server((bind, port), family=family)
        except OSError as exc:
            raise TransportError(f"{bind}:{port}: cannot listen ({exc.strerror}); is the port taken?").with_facts(
                code="PHX-T002", key="--port", found=f"{bind}:{port}", do="end what listens there, or choose another"
            ) from exc
        self.port = listener.getsockname()[1]
        self._server = ConnectionServer(
            listener, self._serve_connection, max_visitors=_MAX_VISITORS, max_stay_s=EXCHANGE_S
        )
        return self

    def close(self) -> None:
        """Take no more connections, and finish with the connections that are being answered."""
        if self._server is not None:
            self._server.close()

    def _serve_connection(self, visitor: ServedConnection) -> None:
        deadline = time.monotonic() + EXCHANGE_S
        try:
            visitor.connection.settimeout(EXCHANGE_S)
            plain = visitor.connection
            with self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False) as secure:
                # the wrapper has taken the socket over, and it alone can be cut off in its handshake
                visitor.connection = secure
                secure.do_handshake()
                send_object(secure, self._answer_question(receive_object(secure, deadline), visitor))
        except (OSError, ssl.SSLError, ValueError, PhalanxError):
            # a caller that speaks another language, or has gone, needs no answer
            return

    def _answer_question(self, question: dict[str, Any], visitor: ServedConnection) -> dict[str, Any]:
        if question == {"ask": "authority"}:
            return {"authority": self._authority, "seal": self._seal_key.public_bytes.hex()}
        try:
            name = read_text_field(question, "name", 63)
            secret = self._open_secret(name, read_text_field(question, "sealed"))
            request = read_text_field(question, "request").encode()
            self._invitations.check_secret(name, secret)
            if self._server is not None:
                self._server.mark_known(visitor)
            self._probe_address(question, name, secret)
            home = self._invitations.admit_party(name, secret, request)
        except (PeerRefusedError, CertificateError, FrameError, ConfigError) as exc:
            self._tell_refusal(printable_text(f"a caller at {visitor.host} is refused: {exc}"))
            return {"refused": str(exc)}
        self._say(f"{name} has made its keys at {visitor.host} and is certified{_describe_machine(question)}")
        return {
            "certificate": read_public(home / "certificate.pem").decode("ascii"),
            "time": int(steady_now().timestamp()),
            "port": self._terms.port,
            "asks": list(self._terms.asks),
            "needs_mib": self._terms.needs_mib,
            **({"run": self._terms.run} if self._terms.run else {}),
        }

    def _open_secret(self, name: str, sealed: str) -> str:
        try:
            return self._seal_key.open_sealed(bytes.fromhex(sealed), secret_purpose(name)).decode("ascii")
        except (ValueError, SignatureError) as exc:
            raise FrameError("its secret is not sealed for this owner") from exc

    def _probe_address(self, question: dict[str, Any], name: str, secret: str) -> None:
        if "reach" not in question:
            return
        with self._lock:
            tries = self._failed_probes.setdefault(name, deque(maxlen=_MAX_PROBES))
            if len(tries) == _MAX_PROBES and tries[0] > self._clock() - _PROBE_WINDOW_S:
                raise FrameError("too many tries in vain; wait a minute")
        refusal = probe_reachability(read_text_field(question, "reach", 300), secret)
        if refusal is not None:
            # who has a token must not use the owner to look at its network
            with self._lock:
                tries.append(self._clock())
            raise PeerRefusedError(refusal)

    def _tell_refusal(self, line: str) -> None:
        with self._lock:
            if line in self._told_refusals or len(self._told_refusals) >= _MAX_LINES:
                return
            self._told_refusals.add(line)
        self._say(line)


def _describe_machine(question: dict[str, Any]) -> str:
    """Return a caller's description of its machine, for people; a claim, on which nothing rests."""
    templates = (("free_mib", "{:,} MiB free for stages"), ("gflops", "{:,} GFLOP/s on one stage's kernels"))
    statements = [text.format(question[key]) for key, text in templates if _is_count(question.get(key))]
    return f"; it says that it has {' and '.join(statements)}" if statements else ""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_CLAIMED
