"""The wire between machines: one gRPC method that carries a frame there and an answer back."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import NoReturn

from phalanx.config import canonical_json, printable_text
from phalanx.errors import (
    CertificateError,
    FrameError,
    PeerGoneError,
    PeerLostError,
    PeerRefusedError,
    TransportError,
    VerificationError,
)
from phalanx.security.crypto import (
    Identity,
    Peer,
    certificate_facts,
    certified_name,
    check_session_name,
    parse_canonical,
    peer_from_certificate,
    steady_now,
)
from phalanx.transport.config import TransportConfig
from phalanx.transport.dialled_stream import DialledStream, answer_questions
from phalanx.transport.grpc_tls import (
    check_refuses_tls12,
    grpc,
    open_channel,
    server_credentials,
    server_options,
)
from phalanx.transport.stacks import MAX_STACKS_BYTES, PartyStacks, describe_own_stacks, parse_stacks
from phalanx.transport.tls_group import check_hybrid_group
from phalanx.transport.wire import Handle

_SERVICE = "phalanx.Transport"
_NUM_THREADS = 192
"""Of a server, at most: a stream that a party has dialled takes one for as long as it lasts."""
_MAX_STREAMS = 96
_STOP_S = 10.0
"""A bound on how long a server takes to stop, which a busy machine may need some of."""
# one frame under way and one repeated by an impatient sender
_MAX_CALLS_PER_PEER = 2
# places in code tell little of a party's data; a stream of them would tell how it goes
_MAX_STACKS_ANSWERS = 16
# a party that asks for another has to answer within the asker's own time
_PASSED_STACKS_S = 4.0
_MAX_CACHED_CERTIFICATES = 1024
_MAX_ADDRESS_CHARACTERS = 300
_MAX_AWAITED, _MAX_NAME = 50, 63
_RETRY_PAUSE_S = 0.1
_REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED}
# the words of BoringSSL and of gRPC's own check of names: a certificate will not get better by waiting
_BAD_CERTIFICATE_WORDS = ("CERTIFICATE_VERIFY_FAILED", "is not in peer certificate", "Hostname Verification")
# the words of the system, as gRPC passes them on
_NOBODY_LISTENS = "Connection refused"


@dataclass(frozen=True, slots=True)
class JoinedPeer:
    """The other party of a `Describe` call, on the calling or the called side.

    Attributes:
        run: The run that it serves; empty for a party that came to join.
        calls_us: Our name in its session.
        awaited: Parties that it reports to wait for; empty where it reports none.
    """

    peer: Peer
    address: str
    run: str
    calls_us: str = ""
    certificate: bytes = b""
    awaited: tuple[str, ...] = ()


class GrpcWire:
    """A wire between machines: it listens from its construction on, and serves once it has an endpoint.

    Args:
        identity: This party, with its certificate.
        config: Address to listen on, deadlines and bounds.

    Attributes:
        address: Listening address, with the port that the system chose.
        name_of: Returns the session name of a certificate's party, or None while it is not known; its argument says
            whether the peer is a process that begins.
        awaited: Parties that it still waits for, for callers to show.
        admit: Refuses a call by its name, and the name and key of the caller; by default none.
        stacks_for: The one party that may ask for the stacks of this process; by default none.
        passes_stacks_to: The one party for which this one asks others for their stacks; by default none.
        has_dialled_streams: Whether parties that listen nowhere may have their frames on a stream that they open.

    Guarantees:
        Nothing of a client is read before TLS 1.3 has proven a currently valid certificate of our authority;
        nothing is sent to a server that has not proven to be the very party it is meant for.
    """

    def __init__(
        self,
        identity: Identity,
        config: TransportConfig,
        *,
        stacks_for: str | None = None,
        passes_stacks_to: str | None = None,
    ) -> None:
        check_second_key(identity.public, config)
        self._identity, self._config = identity, config
        self._checked: set[str] = set()
        self.name_of: Callable[[str, bool], str | None] = lambda certified, begins: certified
        self.awaited: Callable[[], Sequence[str]] = tuple
        self.admit: Callable[[str, str, str], None] = lambda call, name, key: None
        self.stacks_for, self._passes_stacks_to = stacks_for, passes_stacks_to
        self._stacks_left = _MAX_STACKS_ANSWERS
        self.has_dialled_streams = False
        self._streams: dict[str, DialledStream] = {}
        self._closing = threading.Event()
        self._handle: Handle | None = None
        self._run = ""
        self._channels: dict[str, tuple[grpc.Channel, grpc.UnaryUnaryMultiCallable, str]] = {}
        self._joined: dict[str, JoinedPeer] = {}
        self._known: dict[bytes, tuple[Peer, datetime]] = {}
        self._calls: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._has_started = False
        pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix=f"serve-{identity.name}")
        self._server = grpc.server(pool, options=server_options(config))
        self._server.add_generic_rpc_handlers((self._method_handlers(),))
        host = f"[{config.bind}]" if ":" in config.bind else config.bind
        try:
            port = self._server.add_secure_port(f"{host}:{config.port}", server_credentials(identity))
        except RuntimeError as exc:
            raise TransportError(f"{host}:{config.port}: cannot listen; is the port taken?").with_facts(
                code="PHX-T002", key="transport.port", found=f"{host}:{config.port}"
            ) from exc
        self._port: int = port
        self.address = f"{host}:{port}"

    def serve_frames(self, handle: Handle, run: str) -> None:
        """Start to pass arriving frames to `handle`."""
        self._start_server()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.bind, self._config.bind)  # noqa: S104
        try:
            check_refuses_tls12(host, self._port)
            if self._config.post_quantum == "demand":
                check_hybrid_group(self._identity, host, self._port)
        except TransportError:
            self.close()
            raise
        self._run, self._handle = run, handle

    def add_route(self, name: str, address: str) -> None:
        """Tell where a party is reached; connects at the first frame."""
        channel = open_channel(self._identity, name, address, self._config)
        with self._changed:
            old = self._channels.get(name)
            self._channels[name] = (channel, channel.unary_unary(f"/{_SERVICE}/Deliver"), address)
        if old is not None:
            old[0].close()

    def deliver_frame(self, receiver: str, raw: bytes, timeout_s: float) -> bytes:
        """Return the receiver's answer to one frame, over the stream that it has dialled, or to where it listens."""
        with self._changed:
            route, stream = self._channels.get(receiver), self._streams.get(certified_name(receiver))
        if stream is not None:
            return stream.exchange_frame(raw, timeout_s)
        if route is None:
            raise PeerLostError(f"{receiver}: no address is known for it")
        if route[2] not in self._checked:
            _check_route(self._identity, route[2], self._config)
            self._checked.add(route[2])
        return _call_method(route[1], raw, timeout_s, receiver)

    def collect_frames(self, party: str) -> None:
        """Have a party's frames come on a stream that this party dials, again whenever it breaks; it needs a route."""
        collector = threading.Thread(target=self._collect_all, args=(party,), name=f"from-{party}", daemon=True)
        collector.start()

    def wait_joined(self, name: str, timeout_s: float) -> JoinedPeer | None:
        """Wait until a starting party of this name makes a `Describe` call; return it, or None after the time limit."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._joined, timeout_s)
            return self._joined.get(name)

    def close(self) -> None:
        """Stop listening and sending at once."""
        self._closing.set()
        with self._changed:
            channels, self._channels = self._channels, {}
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()
        for channel, _, _ in channels.values():
            channel.close()
        # gRPC gives a port back when its server stops, and only one that has started does; it serves nobody meanwhile
        self._start_server()
        self._server.stop(grace=None).wait(_STOP_S)

    def _start_server(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._server.start()

    def _method_handlers(self) -> grpc.GenericRpcHandler:
        handlers = {
            "Deliver": grpc.unary_unary_rpc_method_handler(self._deliver_call),
            "Describe": grpc.unary_unary_rpc_method_handler(self._describe_call),
            "Collect": grpc.stream_stream_rpc_method_handler(self._collect_call),
            "Stacks": grpc.unary_unary_rpc_method_handler(self._stacks_call),
        }
        return grpc.method_handlers_generic_handler(_SERVICE, handlers)

    def _deliver_call(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        peer = self._admitted_peer("Deliver", context)
        with self._one_of_few_calls(peer.name, context):
            return self._ready_handle(context)(raw, peer.name)

    def _describe_call(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        peer = self._admitted_peer("Describe", context)
        self._ready_handle(context)
        try:
            question = parse_canonical(raw[:4096])
            address = _read_text(question, "address")
        except (ValueError, FrameError):
            _abort_call(context, grpc.StatusCode.INVALID_ARGUMENT, "expected a JSON object with an address")
        begins = question.get("begins") is True
        name = self._name_of(peer.name, begins, context)
        if begins:
            # a process that only looks may be of an earlier session, and end at the answer
            with self._changed:
                self._joined[peer.name] = JoinedPeer(peer, address, "", certificate=_pem_of(context))
                self._changed.notify_all()
        certificate = self._identity.certificate_pem.decode("ascii")
        answer = {"run": self._run, "party": self._identity.name, "certificate": certificate, "you": name}
        awaited = list(self.awaited())[:_MAX_AWAITED]
        return canonical_json(answer | ({"awaited": awaited} if awaited else {}))

    def _collect_call(self, answers: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Send a party's frames on the stream that it has opened; a newer stream of it takes an older one's place."""
        peer = self._admitted_peer("Collect", context)
        self._ready_handle(context)
        if not self.has_dialled_streams:
            _abort_call(context, grpc.StatusCode.UNIMPLEMENTED, "frames come to where a party listens, not on a stream")
        self._name_of(peer.name, False, context)
        stream = DialledStream(peer.name, certificate_facts(_pem_of(context)).not_after, context.cancel)
        with self._changed:
            older = self._streams.pop(peer.name, None)
            is_full = len(self._streams) >= _MAX_STREAMS
            if not is_full:
                self._streams[peer.name] = stream
        if older is not None:
            older.close()
        if is_full:
            _abort_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many parties that listen nowhere")
        context.add_callback(stream.close)
        threading.Thread(target=_take_answers, args=(stream, answers), daemon=True).start()
        try:
            yield from stream.pop_questions()
        finally:
            stream.close()
            with self._changed:
                if self._streams.get(peer.name) is stream:
                    del self._streams[peer.name]

    def _collect_all(self, party: str) -> None:
        while not self._closing.is_set():
            with self._changed:
                route = self._channels.get(party)
            handle = self._handle
            if route is not None and handle is not None:
                method = route[0].stream_stream(f"/{_SERVICE}/Collect")
                # broken by the way between, or by the other end: both may be there again in a moment
                with contextlib.suppress(grpc.RpcError, ValueError):
                    answer_questions(method, partial(_answer_frame, handle, party))
            self._closing.wait(_RETRY_PAUSE_S)

    def _stacks_call(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer from this thread: the computing thread may hang."""
        peer = self._admitted_peer("Stacks", context)
        if peer.name != (self._passes_stacks_to if raw else self.stacks_for):
            _abort_call(context, grpc.StatusCode.PERMISSION_DENIED, "only the owner may ask for stacks")
        # counted apart: the frames of a party that hangs wait in the calls of `Deliver`
        with self._one_of_few_calls(f"stacks of {peer.name}", context):
            return self._pass_stacks(raw, context) if raw else self._describe_stacks(context)

    def _describe_stacks(self, context: grpc.ServicerContext) -> bytes:
        with self._changed:
            if not self._stacks_left:
                _abort_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "no more stacks in this session")
            self._stacks_left -= 1
        return describe_own_stacks()

    def _pass_stacks(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        """Ask the named party of this session."""
        name = raw[:_MAX_NAME].decode("ascii", "replace")
        with self._changed:
            route, has_stream = self._channels.get(name), name in self._streams
        if route is None:
            why = "the party listens nowhere; give its file advertise = HOST, or send it SIGUSR1" if has_stream else ""
            why = why or "no party of this name is in the session"
            _abort_call(context, grpc.StatusCode.NOT_FOUND, why)
        try:
            stacks = ask_peer_stacks(self._identity, name, route[2], self._config, _PASSED_STACKS_S)
        except (TransportError, VerificationError) as exc:
            _abort_call(context, grpc.StatusCode.UNAVAILABLE, printable_text(str(exc)))
        return canonical_json(stacks.model_dump(mode="json"))

    def _name_of(self, certified: str, begins: bool, context: grpc.ServicerContext) -> str:
        try:
            name = self.name_of(certified, begins)
        except TransportError as exc:
            _abort_call(context, grpc.StatusCode.PERMISSION_DENIED, printable_text(str(exc)))
        if name is None:
            _abort_call(context, grpc.StatusCode.UNAVAILABLE, "its last process is still being replaced")
        return name

    def _ready_handle(self, context: grpc.ServicerContext) -> Handle:
        if self._handle is None:
            _abort_call(context, grpc.StatusCode.UNAVAILABLE, "not ready yet")
        return self._handle

    def _admitted_peer(self, call: str, context: grpc.ServicerContext) -> Peer:
        peer = self._peer_of(context)
        try:
            self.admit(call, peer.name, peer.public_key.hex())
        except VerificationError as exc:
            _abort_call(context, grpc.StatusCode.PERMISSION_DENIED, printable_text(str(exc)))
        return peer

    def _peer_of(self, context: grpc.ServicerContext) -> Peer:
        pem = _pem_of(context)
        entry = self._known.get(pem)
        # a connection may outlive the certificate that opened it
        if entry is not None and steady_now() <= entry[1]:
            return entry[0]
        try:
            peer = peer_from_certificate(pem, self._identity.authority_pem, where="client certificate")
            check_second_key(peer, self._config)
        except CertificateError as exc:
            _abort_call(context, grpc.StatusCode.UNAUTHENTICATED, printable_text(str(exc)))
        if len(self._known) >= _MAX_CACHED_CERTIFICATES:
            self._known.clear()
        self._known[pem] = (peer, certificate_facts(pem).not_after)
        return peer

    @contextmanager
    def _one_of_few_calls(self, name: str, context: grpc.ServicerContext) -> Iterator[None]:
        with self._changed:
            if self._calls[name] >= _MAX_CALLS_PER_PEER:
                _abort_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once")
            self._calls[name] += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls[name] -= 1


def _answer_frame(handle: Handle, party: str, raw: bytes) -> bytes:
    return handle(raw, party)


def _take_answers(stream: DialledStream, answers: Iterator[bytes]) -> None:
    # the end of a stream is an error to who reads from it
    with contextlib.suppress(grpc.RpcError):
        stream.take_answers(answers)
    stream.close()


def ask_peer_run(
    identity: Identity,
    party: str,
    address: str,
    own_address: str = "",
    config: TransportConfig | None = None,
    patience_s: float | None = None,
    *,
    begins: bool = False,
) -> JoinedPeer:
    """Ask a party which run it serves, and tell it where we listen: the first call of a party that joins.

    Args:
        party: Name of the party that must answer.
        patience_s: Seconds of retries while there is no answer; None for ``timeout_s``.
        begins: Whether this process has just begun: any other one with this certificate has ended then.
    """
    limits = config or TransportConfig()
    check_second_key(identity.public, limits)
    channel = open_channel(identity, party, address, limits)
    try:
        question = canonical_json({"address": own_address, "begins": begins})
        method = channel.unary_unary(f"/{_SERVICE}/Describe")
        deadline = time.monotonic() + (limits.timeout_s if patience_s is None else patience_s)
        answer = _call_until(method, question, deadline, party)
        _check_route(identity, address, limits)
    finally:
        channel.close()
    try:
        values = parse_canonical(answer)
    except ValueError as exc:
        raise FrameError(f"description of {party}: {exc}") from exc
    certificate = _read_text(values, "certificate", 65536).encode()
    peer = peer_from_certificate(certificate, identity.authority_pem, where=f"certificate of {party}")
    check_second_key(peer, limits)
    if peer.name != party or _read_text(values, "party") != party:
        raise CertificateError(f"description of {party}: names {peer.name!r}")
    run, calls_us = _read_text(values, "run"), check_session_name(_read_text(values, "you"))
    return JoinedPeer(peer, address, run, calls_us, certificate, _read_awaited(values))


def ask_peer_stacks(
    identity: Identity, party: str, address: str, config: TransportConfig, timeout_s: float, of: str = ""
) -> PartyStacks:
    """Ask a party for the stacks of its threads, on a connection of its own beside all frames.

    Args:
        party: Name of the party that must answer; of an incarnation, its certificate's counts.
        of: Party of its session that it is to ask instead; its own stacks when left out.

    Raises:
        PeerRefusedError: It is another party, or does not answer this one.
        PeerLostError: It did not answer within the time, or with too much.
        FrameError: The answer is malformed.
    """
    channel = open_channel(identity, party, address, config.model_copy(update={"max_frame_bytes": MAX_STACKS_BYTES}))
    try:
        return parse_stacks(_call_method(channel.unary_unary(f"/{_SERVICE}/Stacks"), of.encode(), timeout_s, party))
    finally:
        channel.close()


def check_second_key(peer: Peer, config: TransportConfig) -> None:
    """Refuse a party that a quantum computer could imitate, where the configuration demands more."""
    if config.post_quantum == "demand" and not peer.ml_dsa_key:
        raise CertificateError(
            f"{peer.name}: its certificate has no ML-DSA-44 key, and transport.post_quantum demands one; make a new "
            "authority and certificates with phalanx pki"
        )


def _check_route(identity: Identity, address: str, config: TransportConfig) -> None:
    """Refuse a server that would not negotiate the hybrid group, where the configuration demands it."""
    if config.post_quantum == "demand":
        host, _, port = address.rpartition(":")
        check_hybrid_group(identity, host.strip("[]"), int(port))


def _read_awaited(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the parties that another one claims to wait for; anything but a short list of names is left out."""
    awaited = values.get("awaited")
    names = awaited[:_MAX_AWAITED] if isinstance(awaited, list) else []
    return tuple(name for name in names if isinstance(name, str) and len(name) <= _MAX_NAME)


def _pem_of(context: grpc.ServicerContext) -> bytes:
    return b"".join(context.auth_context().get("x509_pem_cert", []))


def _abort_call(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details)
    # not reached: abort raises
    raise PeerRefusedError(details)


def _read_text(values: dict[str, object], name: str, max_characters: int = _MAX_ADDRESS_CHARACTERS) -> str:
    value = values.get(name)
    if not isinstance(value, str) or len(value) > max_characters:
        raise FrameError(f"description: {name} is missing, no text or over-long")
    return value


def _call_until(method: grpc.UnaryUnaryMultiCallable, raw: bytes, deadline: float, party: str) -> bytes:
    while True:
        remaining_s = max(deadline - time.monotonic(), 0.001)
        try:
            return _call_method(method, raw, remaining_s, party)
        except PeerLostError:
            if time.monotonic() + _RETRY_PAUSE_S >= deadline:
                raise
        time.sleep(_RETRY_PAUSE_S)


def _call_method(method: grpc.UnaryUnaryMultiCallable, raw: bytes, timeout_s: float, party: str) -> bytes:
    try:
        answer: bytes = method(raw, timeout=timeout_s)
    except grpc.RpcError as exc:
        details = printable_text(exc.details() or "")
        if exc.code() in _REFUSED or any(phrase in details for phrase in _BAD_CERTIFICATE_WORDS):
            raise PeerRefusedError(f"{party}: {details}") from exc
        lost = PeerGoneError if _NOBODY_LISTENS in details else PeerLostError
        raise lost(f"{party}: {exc.code().name.lower()}: {details}") from exc
    except ValueError as exc:
        raise PeerLostError(f"{party}: its channel is closed") from exc
    return answer
