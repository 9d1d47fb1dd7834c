"""An owner and its writers take turns in one thread: the real engine on both sides, real signatures, and a clock that
moves only while no party has anything to do. A run is a function of its schedule, and a timeout costs no time.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json
from phalanx.rollouts import (
    CheckedShare,
    Rollout,
    RolloutCheck,
    RolloutPolicy,
    RolloutRequest,
    RolloutWriter,
    company,
    examiner,
)
from phalanx.rollouts.company import RolloutCompany
from phalanx.rollouts.evidence import EvidenceDirectory
from phalanx.rollouts.worker import RolloutService
from phalanx.security.crypto import (
    Identity,
    create_authority,
    digest_hex,
    issue_certificate,
    load_identity,
    parse_canonical,
)
from phalanx.transport import CheckedFrame, HeaderFields, SignedHeader, TransportConfig, sign_header
from phalanx.transport.link import SendingChain

SESSION = "run-1"
LIMITS = TransportConfig()
_TIMED = (company, examiner)


@dataclass(frozen=True)
class Said:
    """A frame that a writer is about to send."""

    kind: str
    body: dict[str, Any]
    payload: bytes = b""


Rewrite = Callable[[int, Said], Sequence[Said]]
"""What a writer sends in place of a frame of its honest self, in this step."""


def honest(_step: int, said: Said) -> Sequence[Said]:
    return [said]


class Clock:
    """A clock that stands still until a party waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return 0.0


class TurnEnd:
    """One party's end: what it sends is sealed and handed over, or lies in the owner's queue until it is read.

    Args:
        identity: The party.
        deliver: Takes each frame.
    """

    def __init__(self, identity: Identity, deliver: Callable[[str, CheckedFrame], None]) -> None:
        self.identity, self.name = identity, identity.name
        self._deliver = deliver
        self._chains: dict[str, SendingChain] = {}

    def send_frame(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        data = b"".join(bytes(part) for part in payload)
        chain = self._chains.setdefault(receiver, SendingChain(self.identity, SESSION, receiver, LIMITS))
        header = chain.seal_header(kind, body, len(data), digest_hex(data))
        # what the receiver reads was bytes in between
        read = parse_canonical(canonical_json(body))
        self._deliver(receiver, CheckedFrame(self.name, kind, read, memoryview(data), header))
        return header

    def send_anything(self, receiver: str, said: Said) -> None:
        """Sign what the schema does not allow, too."""
        start = digest_hex(receiver.encode())
        fields = HeaderFields(
            SESSION, said.kind, self.name, receiver, 0, start, len(said.payload), digest_hex(said.payload), said.body
        )
        header = sign_header(self.identity, fields)
        self._deliver(receiver, CheckedFrame(self.name, said.kind, said.body, memoryview(said.payload), header))


class OwnerEnd(TurnEnd):
    """The owner's end; its queue is read as an inbox is."""

    def __init__(self, identity: Identity, deliver: Callable[[str, CheckedFrame], None], clock: Clock) -> None:
        super().__init__(identity, deliver)
        self.queue: deque[CheckedFrame] = deque()
        self.refused: set[str] = set()
        self._clock = clock

    def receive_item(self, timeout_s: float) -> CheckedFrame | None:
        if self.queue:
            return self.queue.popleft()
        self._clock.now += max(timeout_s, 1e-3)
        return None

    def evict_party(self, party: str) -> None:
        self.refused.add(party)


class Pki:
    """An owner and three writers with certificates of one authority."""

    def __init__(self, home: Path) -> None:
        create_authority(home)
        self.authority = home / "authority.pem"
        self.writers = ("writer-0", "writer-1", "writer-2")
        self.identities = {name: load_identity(issue_certificate(home, name)) for name in ("owner", *self.writers)}

    def desk(self, home: Path) -> EvidenceDirectory:
        certificates = {name: one.certificate_pem.decode() for name, one in self.identities.items()}
        return EvidenceDirectory(
            home / "evidence", SESSION, self.identities["owner"].authority_pem.decode(), certificates
        )


class TurnTaking:
    """A company of writers in turns.

    Args:
        home: For evidence.
        pki: Of the parties.
        check: What is read again; a clock of its own measures its timeout.
        writers: What each worker computes.
        rewrites: What each worker sends instead; left out, it is honest.
        reward: What a text earns.

    Attributes:
        sent: Every frame that the owner sent, by receiver, with its header.
        answered: Every frame of a writer that reached the owner.
        step: That is under way.
        services: Of the writers.
        held: Frames of writers that come when a later step begins: step, sender and frame.
    """

    def __init__(
        self,
        home: Path,
        pki: Pki,
        check: RolloutCheck,
        writers: Mapping[str, RolloutWriter],
        rewrites: Mapping[str, Rewrite],
        reward: Callable[[Rollout], float] | None = None,
    ) -> None:
        self.clock, self.step = Clock(), 0
        self.held: list[tuple[int, str, Said]] = []
        self.sent: list[tuple[str, SignedHeader]] = []
        self.answered: list[CheckedFrame] = []
        self._rewrites = rewrites
        self._end = OwnerEnd(pki.identities["owner"], self._to_writer, self.clock)
        self._ends = {name: TurnEnd(pki.identities[name], self._to_owner) for name in writers}
        self.services = {name: RolloutService(_RewrittenEnd(self, name), "owner", one) for name, one in writers.items()}
        share = CheckedShare(b"k" * 32, check.rate)
        self.owner = RolloutCompany(self._end, tuple(writers), check, share, pki.desk(home), reward)

    def generate(self, policy: RolloutPolicy, model: Any, request: RolloutRequest) -> tuple[Rollout, ...]:
        """One step."""
        self.step = request.step
        for _, name, said in [one for one in self.held if one[0] <= request.step]:
            self._ends[name].send_anything("owner", said)
        self.held = [one for one in self.held if one[0] > request.step]
        with self.own_clock():
            return self.owner.generate(policy, model, request)

    def say(self, name: str, said: Said) -> None:
        """Have a writer send a frame now."""
        self._ends[name].send_anything("owner", said)

    @contextlib.contextmanager
    def own_clock(self) -> Iterator[None]:
        """Have the engine's waits measured by the clock that stands still."""
        for module in _TIMED:
            module.time = self.clock
        try:
            yield
        finally:
            for module in _TIMED:
                module.time = time

    def speak(self, name: str, said: Said) -> None:
        """Have a writer send what its rewriting makes of a frame."""
        for one in self._rewrites.get(name, honest)(self.step, said):
            self.say(name, one)

    def _to_writer(self, name: str, item: CheckedFrame) -> None:
        self.sent.append((name, item.header))
        self.services[name].handle_frame(item)

    def _to_owner(self, _owner: str, item: CheckedFrame) -> None:
        if item.sender not in self._end.refused:
            self.answered.append(item)
            self._end.queue.append(item)


class _RewrittenEnd:
    """A writer's end as its service sees it."""

    def __init__(self, table: TurnTaking, name: str) -> None:
        self._table, self.name = table, name

    def send_frame(
        self, _receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> None:
        self._table.speak(self.name, Said(kind, body, b"".join(bytes(part) for part in payload)))
