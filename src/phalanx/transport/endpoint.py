"""One party's end of all its links: it signs and sends frames, and accepts or refuses other parties' frames."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from phalanx.closing import Closeable
from phalanx.errors import (
    FrameError,
    OrderError,
    PeerLostError,
    PeerRefusedError,
    SignatureError,
    TransportError,
    VerificationError,
)
from phalanx.security.crypto import Identity, Peer, certified_name, digest_hex, incarnation_of
from phalanx.transport.config import TransportConfig
from phalanx.transport.frame import Receipt, SignedHeader, check_payload, parse_frame, sign_receipt
from phalanx.transport.inbox import Allowances, CheckedFrame, Inbox, LinkFault
from phalanx.transport.link import (
    CpuMeter,
    Receipts,
    ReceivingChain,
    SendingChain,
    encode_receipt,
    encode_refusal,
    is_receipt_due,
)
from phalanx.transport.outbox import DeliveredFrame, Outbox, Payload
from phalanx.transport.wire import Wire


class _ReceivingLink:
    """The receiving side's state of one peer."""

    def __init__(self, peer: Peer, chain: ReceivingChain) -> None:
        self.peer = peer
        self.chain = chain
        # one frame of a link is judged at a time: a repeated one waits for the verdict on the first
        self.lock = threading.Lock()


class Endpoint(Closeable):
    """An endpoint sends signed frames to known parties and keeps the one inbox of its party.

    Args:
        peers: The parties it knows, by name; `add_peer` adds more.
        run: Session; frames of another one are refused.
        wire: Carries the bytes and proves which party is at the other end.

    Attributes:
        receipts: Receipts of the frames that arrived.
        allowances: Remaining allowance of each peer; unlimited, unless its `each` is set.

    Guarantees:
        Every frame from `receive_item` was signed by its sender for this party and run, in this order, without a
        gap and without a repetition, and its payload is the signed one. Whether it is *true* is not known here. No
        bytes from outside end the server or raise anything in it.
    """

    def __init__(
        self, identity: Identity, peers: Mapping[str, Peer], run: str, wire: Wire, limits: TransportConfig
    ) -> None:
        self.receipts = Receipts()
        self.allowances = Allowances()
        self._identity, self._run, self._wire, self._limits = identity, run, wire, limits
        self._links: dict[str, _ReceivingLink] = {}
        self._incarnations: dict[str, str] = {}
        """The latest incarnation of each certificate; frames of an earlier one are refused."""
        self._outboxes: dict[str, Outbox] = {}
        self._evicted: set[str] = set()
        # their frames are refused too, but until the owner decides they take part: what is for them is still signed
        self._cut: set[str] = set()
        self._refusals: Counter[str] = Counter()
        self._last_refusal: dict[str, TransportError | VerificationError] = {}
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._meter = CpuMeter()
        self._inbox = Inbox(limits.max_queued_bytes)
        self._own_chain = SendingChain(identity, run, identity.name, limits)
        self._lock = threading.Lock()
        self._closed = False
        for peer in peers.values():
            self.add_peer(peer)
        wire.serve_frames(self.answer_frame, run)

    @property
    def party_name(self) -> str:
        """This party."""
        return self._identity.name

    @property
    def public_peer(self) -> Peer:
        """This party's name and public keys, by which others know it."""
        return self._identity.public

    @property
    def session_name(self) -> str:
        """The session; frames of another one are refused."""
        return self._run

    @property
    def known_peers(self) -> Mapping[str, Peer]:
        """The known parties, evicted ones included."""
        with self._lock:
            return MappingProxyType({name: link.peer for name, link in self._links.items()})

    @property
    def waiting_call(self) -> int | None:
        """Number of the present call of `receive_item`, while it waits for a frame.

        None while an item is there or no call waits.
        """
        return self._inbox.waiting_call

    @property
    def sending_to(self) -> frozenset[str]:
        """Names of the parties that still have to take frames of this party."""
        with self._lock:
            outboxes = dict(self._outboxes)
        return frozenset(name for name, outbox in outboxes.items() if outbox.is_busy)

    @property
    def bytes_sent(self) -> Mapping[str, int]:
        """Bytes of the frames that each peer has taken, up to now."""
        return MappingProxyType(dict(self._sent))

    @property
    def bytes_received(self) -> Mapping[str, int]:
        """Bytes of the accepted frames of each peer, up to now."""
        return MappingProxyType(dict(self._received))

    @property
    def refusal_counts(self) -> Mapping[str, int]:
        """Number of refused frames, by the proven name of their sender."""
        return MappingProxyType(self._refusals)

    @property
    def seconds_hashing(self) -> float:
        """CPU time spent on payload digests."""
        return self._meter.cpu_seconds("hashing")

    @property
    def seconds_signing(self) -> float:
        """CPU time spent on signing and checking headers and receipts, their encoding included."""
        return self._meter.cpu_seconds("signing")

    def last_refusal(self, peer: str) -> TransportError | VerificationError | None:
        """Return why the latest refused frame of a peer was refused."""
        return self._last_refusal.get(peer)

    def add_peer(self, peer: Peer, address: str = "") -> None:
        """Get to know a party, or where it is; a party never changes its key within a run.

        A frame of a party that is not known yet is refused, and its link with it: parties must know each
        other before the first of them sends. This party itself is passed over. A later incarnation of a known party
        has chains of its own, and from now on nothing of an earlier one is taken.
        """
        if peer == self._identity.public:
            return
        with self._lock:
            certified = certified_name(peer.name)
            latest = self._incarnations.setdefault(certified, peer.name)
            link = self._links.get(latest)
            if peer.name == self.party_name or (link is not None and link.peer.public_key != peer.public_key):
                raise PeerRefusedError(f"{peer.name}: is known with another key; a new party needs a new name")
            if peer.name not in self._links:
                self._links[peer.name] = _ReceivingLink(peer, ReceivingChain(self._run, peer.name, self.party_name))
            if incarnation_of(peer.name) > incarnation_of(latest):
                self._incarnations[certified] = peer.name
        if address:
            self._wire.add_route(peer.name, address)

    def send_frame(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        """Hash, sign and queue one frame; it is delivered in the background, in order.

        Args:
            body: JSON data of that kind.
            payload: Contiguous buffers; copied before the call returns.

        Returns:
            The header; `receipts` proves that it arrived, once a receipt has come that speaks for it.

        Raises:
            FrameError: The frame is too large or its body is no JSON data.
            PeerLostError: The link has failed, or its queue stayed full for the whole deadline.
        """
        return self._outbox_for(receiver).queue_frame(kind, body, self._hash_payload(payload))

    def send_hashed(self, receiver: str, kind: str, body: dict[str, Any], payload: memoryview, digest: str) -> None:
        """Send one frame as `send` does, with a payload that the caller has digested already.

        Args:
            body: JSON data of that kind.
            payload: Copied before the call returns.
            digest: `digest_hex` over it; signed unseen, and the receiver refuses a wrong one.
        """
        self._outbox_for(receiver).queue_frame(kind, body, Payload([payload], payload.nbytes, digest))

    def put_aside(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        """Sign a frame for a party behind a failed link: another party can relay it, under its sender's header.

        Raises:
            PeerRefusedError: The receiver is unknown or evicted, or its link has not failed.
        """
        return self._outbox_for(receiver).put_aside(kind, body, self._hash_payload(payload))

    def end_link(self, receiver: str, reason: str) -> None:
        """Let the link to a party fail: a `LinkFault` arrives, and `take_undelivered` returns the queued frames."""
        self._outbox_for(receiver).fail_link(PeerLostError(f"{receiver}: {reason}"))

    def take_undelivered(self, receiver: str) -> Sequence[tuple[SignedHeader, memoryview]]:
        """Hand out, once, the frames with their payloads that a link had not delivered when it failed, in order.

        The first one may have arrived all the same: only its answer is missing.
        """
        with self._lock:
            outbox = self._outboxes.get(receiver)
        frames = [] if outbox is None else outbox.take_undelivered()
        return [(header, memoryview(raw)[len(raw) - header.fields.payload_size :]) for header, raw in frames]

    def seal_for_self(
        self, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        """Sign a message to this party itself: nothing is sent, but it is committed to as any other."""
        buffers = [memoryview(part).cast("B") for part in payload]
        with self._meter.measure_cpu_time("hashing"):
            digest = digest_hex(*buffers)
        with self._meter.measure_cpu_time("signing"), self._lock:
            return self._own_chain.seal_header(kind, body, sum(part.nbytes for part in buffers), digest)

    def receive_item(self, timeout_s: float) -> CheckedFrame | LinkFault | None:
        """Return the oldest frame or fault, or None when there is none within the time.

        Raises:
            PeerLostError: This endpoint is closed, and all that came before has been received.
        """
        return self._inbox.get_item(timeout_s)

    def flush_frames(self, timeout_s: float) -> None:
        """Wait until every queued frame was taken; links that failed are not waited for."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.wait_until_taken(max(0.0, deadline - time.monotonic()))

    def evict_party(self, party: str) -> None:
        """Evict a party for the rest of the run: its frames are refused, the queue to it is dropped.

        Frames of it that were accepted before are still in the inbox.
        """
        with self._lock:
            self._evicted.add(party)
            outbox = self._outboxes.get(party)
        self._inbox.refuse_sender(party)
        if outbox is not None:
            outbox.drop_queue(PeerRefusedError(f"{party}: was evicted"))

    def answer_frame(self, raw: bytes | memoryview, tls_peer: str) -> bytes:
        """Check one frame from outside and answer it; the server's side of a wire calls this.

        Args:
            raw: The bytes, which do not change any more.
            tls_peer: The sender, as proven by the wire.

        Returns:
            A receipt where one is due, or the class and text of the error for which the frame was refused.
        """
        try:
            return encode_receipt(self._accept_frame(raw, tls_peer))
        except (TransportError, VerificationError) as exc:
            with self._lock:
                self._refusals[tls_peer] += 1
                self._last_refusal[tls_peer] = exc
            if isinstance(exc, FrameError | OrderError | SignatureError):
                self.count_refusal(self._incarnations.get(tls_peer, tls_peer), memoryview(raw).nbytes)
            return encode_refusal(exc)

    def count_refusal(self, peer: str, size_bytes: int) -> None:
        """Count a message that was of no use, by the bytes that were read of it; one too many ends the peer's link."""
        reason = self.allowances.spend_refusal(peer, size_bytes)
        if reason is not None:
            self._cut_off(peer, reason)

    def close(self) -> None:
        """Stop sending and receiving; queued frames are dropped."""
        with self._lock:
            self._closed = True
            outboxes = list(self._outboxes.values())
        self._inbox.close()
        for outbox in outboxes:
            outbox.drop_queue(PeerRefusedError(f"{self.party_name}: its endpoint is closed"))
        self._wire.close()
        for outbox in outboxes:
            outbox.join_thread(timeout_s=1.0)

    def _accept_frame(self, raw: bytes | memoryview, tls_peer: str) -> Receipt | None:
        name = self._incarnations.get(tls_peer, tls_peer)
        link = self._links.get(name)
        if link is None or name in self._evicted or name in self._cut:
            unknown = "is not a party of this run; its run file names workers in pipeline.remote_workers and may_join"
            raise PeerRefusedError(f"{tls_peer}: {unknown if link is None else 'is evicted'}")
        excess = self.allowances.spend_frame(name, memoryview(raw).nbytes)
        if excess is not None:
            self._cut_off(name, excess)
            raise PeerRefusedError(f"{tls_peer}: sent {excess}")
        frame = parse_frame(raw, self._limits)
        self.allowances.check_header(name, len(frame.header.header_bytes))
        fields = frame.header.fields
        if (fields.sender, fields.receiver, fields.run) != (name, self.party_name, self._run):
            raise PeerRefusedError(f"{tls_peer}: sent a frame of another sender or life, for another receiver or run")
        with link.lock:
            with self._meter.measure_cpu_time("signing"):
                frame.header.verify_sender(link.peer)
            if not link.chain.check_order(frame.header):
                return link.chain.last_receipt
            with self._meter.measure_cpu_time("hashing"):
                check_payload(frame)
            receipt = self._receipt_for(frame.header)
            received = CheckedFrame(fields.sender, fields.kind, fields.body, frame.payload, frame.header)
            self._inbox.put_frame(received, len(raw), self._limits.timeout_s)
            link.chain.accept_header(frame.header, receipt)
            self._received[name] += len(raw)
        return receipt

    def _cut_off(self, peer: str, reason: str) -> None:
        """Accept no more frames of a peer, and report it; its frames in the inbox are dropped."""
        with self._lock:
            if peer in self._evicted or peer in self._cut:
                return
            self._cut.add(peer)
            outbox = self._outboxes.get(peer)
        error = PeerRefusedError(f"{peer}: sent {reason}")
        self._inbox.cut_off(peer, LinkFault(peer, error))
        if outbox is not None:
            outbox.drop_queue(error)

    def _receipt_for(self, header: SignedHeader) -> Receipt | None:
        if not is_receipt_due(header.fields):
            return None
        with self._meter.measure_cpu_time("signing"):
            return sign_receipt(self._identity, header.header_digest)

    def _hash_payload(self, payload: Sequence[bytes | memoryview]) -> Payload:
        buffers = [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]
        with self._meter.measure_cpu_time("hashing"):
            digest = digest_hex(*buffers)
        return Payload(buffers, sum(part.nbytes for part in buffers), digest)

    def _outbox_for(self, receiver: str) -> Outbox:
        with self._lock:
            link = self._links.get(receiver)
            if link is None or receiver in self._evicted or self._closed:
                raise PeerRefusedError(f"{receiver}: is unknown, evicted, or this endpoint is closed")
            if receiver not in self._outboxes:
                chain = SendingChain(self._identity, self._run, receiver, self._limits)
                self._outboxes[receiver] = Outbox(
                    chain, link.peer, self._wire, self._limits, self._meter, report=self._report_delivery
                )
            return self._outboxes[receiver]

    def _report_delivery(self, outcome: DeliveredFrame | LinkFault) -> None:
        if isinstance(outcome, LinkFault):
            self._inbox.put_fault(outcome)
            return
        self._sent[outcome.header.fields.receiver] += outcome.size_bytes
        self.receipts.add_receipt(outcome.header, outcome.receipt)
