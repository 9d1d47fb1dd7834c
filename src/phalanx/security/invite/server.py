"""The owner's enrolment endpoint: it answers invited machines, and is of no use to others."""

import contextlib
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from phalanx.closing import Closeable
from phalanx.config import printable
from phalanx.errors import CertificateError, ConfigError, FrameError, PeerRefusedError, PhalanxError, TransportError
from phalanx.security.crypto import load_authority, load_identity, read_public, steady_now
from phalanx.security.invite.knock import knock
from phalanx.security.invite.line import EXCHANGE_S, receive_line, send_line, server_context, text
from phalanx.security.invite.register import Invitations

_MOST_AT_ONCE = 16
_MOST_AT_ONCE_EACH = 2
_WRONG_TRIES, _WRONG_WINDOW_S = 5, 60.0
_MOST_ADDRESSES = 4096
_MOST_CLAIMED = 10**9
_LOOK_S = 0.2


@dataclass(frozen=True)
class JoinTerms:
    """The terms under which a machine joins.

    Attributes:
        port: Where the owner listens during the run.
        asks: What the machine is asked to do, in lines for people.
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
        directory: Of the authority, with the owner's identity in ``owner``.
        invitations: The register that admits or refuses.
        terms: What it tells those that come.
        say: Takes a line about each that came or was refused; called from other threads.
        clock: Monotonic seconds.

    Attributes:
        port: Where it listens.

    Guarantees:
        TLS 1.3. Nothing but the authority's certificate is told without the secret of an invitation. A caller gets ten
        seconds, 16 KiB and two connections at once, and after five wrong tokens a minute's pause. The owner knocks only
        where the secret of an invitation was shown. No bytes from outside end the server.
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
        self._invitations, self._terms, self._say, self._clock = invitations, terms, say, clock
        self._wrong: dict[str, deque[float]] = {}
        self._open: Counter[str] = Counter()
        self._lock = threading.Condition()
        self._closed = threading.Event()
        self._listener: socket.socket | None = None
        self.port = 0

    def listen(self, bind: str, port: int) -> Self:
        """Begin to answer.

        Raises:
            TransportError: The address cannot be listened on.
        """
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            listener = socket.create_server((bind, port), family=family)
        except OSError as exc:
            raise TransportError(f"{bind}:{port}: cannot listen ({exc.strerror}); is the port taken?").about(
                code="PHX-T002", key="--port", found=f"{bind}:{port}", do="end what listens there, or choose another"
            ) from exc
        listener.settimeout(_LOOK_S)
        self._listener, self.port = listener, listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), name="enrolment", daemon=True).start()
        return self

    def close(self) -> None:
        """Take no more connections, and finish with those that are being answered."""
        self._closed.set()
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            self._lock.wait_for(lambda: not self._open, EXCHANGE_S)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, address = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed.is_set():
                    return
                # such as too many open files: what is open ends within seconds
                self._closed.wait(_LOOK_S)
                continue
            host = str(address[0])
            if self._enters(host):
                threading.Thread(target=self._serve, args=(connection, host), daemon=True).start()
            else:
                connection.close()

    def _enters(self, host: str) -> bool:
        with self._lock:
            if self._open.total() >= _MOST_AT_ONCE or self._open[host] >= _MOST_AT_ONCE_EACH:
                return False
            self._open[host] += 1
            return True

    def _serve(self, connection: socket.socket, host: str) -> None:
        deadline = time.monotonic() + EXCHANGE_S
        # each read has a timeout of its own, so that only this bounds a handshake that comes byte by byte
        timer = threading.Timer(EXCHANGE_S, _cut, (connection,))
        timer.daemon = True
        timer.start()
        try:
            connection.settimeout(EXCHANGE_S)
            with self._context.wrap_socket(connection, server_side=True) as secure:
                send_line(secure, self._answer(receive_line(secure, deadline), host))
        except (OSError, ssl.SSLError, ValueError, PhalanxError):
            # a caller that speaks another language, or has gone, needs no answer
            pass
        finally:
            timer.cancel()
            connection.close()
            with self._lock:
                self._open[host] -= 1
                if not self._open[host]:
                    del self._open[host]
                self._lock.notify_all()

    def _answer(self, question: dict[str, Any], host: str) -> dict[str, Any]:
        if question == {"ask": "authority"}:
            return {"authority": self._authority}
        try:
            name, secret = text(question, "name", 63), text(question, "secret", 64)
            request = text(question, "request").encode()
            self._check_rate(host)
            self._invitations.check(name, secret)
            self._knock(question, secret)
            home = self._invitations.admit(name, secret, request)
        except (PeerRefusedError, CertificateError, FrameError, ConfigError) as exc:
            if isinstance(exc, PeerRefusedError):
                self._count_wrong(host)
            self._say(printable(f"a caller at {host} is refused: {exc}"))
            return {"refused": str(exc)}
        self._say(f"{name} has made its keys at {host} and is certified{_claims(question)}")
        return {
            "certificate": read_public(home / "certificate.pem").decode("ascii"),
            "time": int(steady_now().timestamp()),
            "port": self._terms.port,
            "asks": list(self._terms.asks),
            "needs_mib": self._terms.needs_mib,
            **({"run": self._terms.run} if self._terms.run else {}),
        }

    def _knock(self, question: dict[str, Any], secret: str) -> None:
        if "reach" not in question:
            return
        refusal = knock(text(question, "reach", 300), secret)
        if refusal is not None:
            raise PeerRefusedError(refusal)

    def _check_rate(self, host: str) -> None:
        with self._lock:
            tries = self._wrong.get(host, ())
            recent = sum(moment > self._clock() - _WRONG_WINDOW_S for moment in tries)
        if recent >= _WRONG_TRIES:
            raise FrameError("too many tries in vain; wait a minute")

    def _count_wrong(self, host: str) -> None:
        with self._lock:
            if len(self._wrong) >= _MOST_ADDRESSES:
                self._wrong.clear()
            self._wrong.setdefault(host, deque(maxlen=_WRONG_TRIES)).append(self._clock())


def _claims(question: dict[str, Any]) -> str:
    """Return what a caller says of its machine, for people; a claim, on which nothing rests."""
    words = (("free_mib", "{:,} MiB free for stages"), ("gflops", "{:,} GFLOP/s on one stage's kernels"))
    said = [text.format(question[key]) for key, text in words if _is_count(question.get(key))]
    return f"; it says that it has {' and '.join(said)}" if said else ""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_CLAIMED


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
