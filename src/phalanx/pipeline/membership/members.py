"""The workers of a run, which come, leave and are replaced, each life a party of its own; and the links to them."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.checkpoint.state_files import StateFiles
from phalanx.config import printable_text
from phalanx.errors import PeerRefusedError
from phalanx.pipeline.assignment.memory import Rooms
from phalanx.pipeline.membership.admission import Admission
from phalanx.pipeline.proof.step_record import NoteChecks, StepRecord
from phalanx.pipeline.protocol.log_memory import LogHeadExchange, Observe
from phalanx.pipeline.protocol.messages import StateDigest
from phalanx.pipeline.worker.roles import BuildHeldStage
from phalanx.security.crypto import Revocation, certified_name, name_of_incarnation
from phalanx.transport import Endpoint, LinkFault


class Incarnations:
    """The present incarnation of each certificate; the wire's threads ask it, the engine's thread tells it.

    Args:
        endpoint: Gets to know a later incarnation before its first message.
        names: Parties that take part already.
        returns: Maximum of returns of each certificate in this session after it was lost or has left.

    Guarantees:
        A party that was shut out for good, in any incarnation, begins no other. Nothing of an earlier incarnation is
        taken for a later one's: every frame has the signed name of its sender's incarnation.
    """

    def __init__(self, endpoint: Endpoint, names: Collection[str], returns: int) -> None:
        self._endpoint = endpoint
        self._returns = returns
        self._present = {certified_name(name): name for name in names}
        self._ended: Counter[str] = Counter()
        self._barred: set[str] = set()
        self._restarted: set[str] = set()
        self._lock = threading.Lock()

    def name_incarnation(self, certified: str, begins: bool) -> str | None:
        """Return the name of a certificate's present or next incarnation.

        Args:
            begins: Whether its process has just begun, so that any earlier one has ended.

        Returns:
            None while an earlier incarnation is still to be shut out.
        """
        with self._lock:
            present, first = self._present.get(certified), self._endpoint.known_peers.get(certified)
            if not begins or first is None:
                return present or certified
            if certified in self._barred:
                raise PeerRefusedError(f"{certified} was excluded and may not come back").with_facts(
                    code="PHX-T042", found=certified
                )
            if present is not None:
                self._restarted.add(present)
                return None
            if self._ended[certified] > self._returns:
                raise PeerRefusedError(
                    f"{certified} was lost {self._ended[certified]} times in this session, and pipeline.returns is "
                    f"{self._returns}; it may come back when the run is resumed"
                )
            name = name_of_incarnation(certified, self._ended[certified] + 1)
            self._endpoint.add_peer(first.with_session_name(name))
            return name

    def note_arrival(self, name: str) -> None:
        """Note that a party has sent its first message."""
        with self._lock:
            self._present[certified_name(name)] = name

    @property
    def present_names(self) -> tuple[str, ...]:
        """The incarnations that have come and take part, or are about to."""
        with self._lock:
            return tuple(self._present.values())

    def note_end(self, name: str, *, for_good: bool) -> None:
        """Note that a party takes part no more."""
        with self._lock:
            certified = certified_name(name)
            if self._present.get(certified) == name:
                del self._present[certified]
                self._ended[certified] += 1
            self._restarted.discard(name)
            if for_good:
                self._barred.add(certified)

    def bar_certificate(self, certified: str) -> str | None:
        """Let no process with this certificate begin any more, and refuse its incarnations that do not take part.

        Returns:
            The one that takes part, or is about to; the caller decides what becomes of it.
        """
        with self._lock:
            self._barred.add(certified)
            present = self._present.get(certified)
        for name in self._endpoint.known_peers:
            if certified_name(name) == certified and name != present:
                self._endpoint.evict_party(name)
        return present

    def take_restarted(self) -> list[str]:
        """Hand out, once, the parties with a process that has begun anew: their incarnations are over."""
        if not self._restarted:
            return []
        with self._lock:
            restarted, self._restarted = sorted(self._restarted), set()
            return restarted


def revocation_facts(entry: Revocation) -> dict[str, object]:
    """Return the body of the audit log's event `revoked` for a certificate."""
    return {
        "party": entry.party,
        "message_key": entry.message_key,
        "revoked_at": entry.time,
        "reason": printable_text(entry.reason),
    }


NoteVerified = Callable[[int, Mapping[int, str], Mapping[int, StateDigest]], None]


@dataclass
class Members:
    """The parties that take part besides the owner."""

    names: Sequence[str]
    admission: Admission
    """The admission that has measured the numeric class of every member."""
    addresses: dict[str, str]
    certificates: Mapping[str, str]
    """Certificates of every party that takes part or may come later, the owner included."""
    memory_by_party: dict[str, Rooms] = field(default_factory=dict)
    """Memory of every party, the owner included, as each reported when it came; one that is not in it has no limit."""
    authority: str = ""
    """PEM of the authority that issued the certificates; goes into evidence."""
    is_alive: Callable[[str], bool] = lambda name: True
    dismiss: Callable[[str], None] = lambda name: None
    """Ends a local worker's process; nothing for a remote one."""
    ask_stacks: Callable[[str], None] = lambda name: None
    """Asks a remote worker, in the background, where its threads are; nothing for a local one."""
    replace: Callable[[str], None] = lambda name: None
    """Starts another local worker in the place of one that is gone, if the run file allows it."""
    returns: int = 0
    """How often one that was lost or has left may come back in this session."""
    rebalance_every: int = 0
    """Steps over which every worker's pace is measured, for stages to move away from slow ones; 0: they stay."""
    revoked: Callable[[], Mapping[str, Revocation]] = dict
    """Reads which certificates the owner has taken back, by the name in each."""
    unreachable: Sequence[LinkFault] = ()
    """Links that failed before the engine could hear of it."""
    incarnations: Incarnations | None = None
    """The incarnations so far, where they were counted; told of later ones from now on."""
    witnesses: LogHeadExchange = field(default_factory=LogHeadExchange)
    """Tells what is remembered of the owner's audit log, and heeds it."""
    look_after: Callable[[], None] = lambda: None
    """Does the same for a local worker that ended before it joined; called whenever there is nothing else to do."""

    def new_revocations(self, before: Collection[str]) -> list[Revocation]:
        """Return new revocations of parties of this run, without the ones named in `before`.

        Raises:
            CertificateError: The list cannot be read, so no party is known to be still one.
        """
        revoked = self.revoked().items()
        return [entry for name, entry in revoked if name in self.certificates and name not in before]

    def add_incarnation(self, name: str) -> None:
        """Note that a known party has begun another incarnation, under the same certificate."""
        self.certificates = {**self.certificates, name: self.certificates[certified_name(name)]}

    @property
    def numeric_classes(self) -> dict[str, str]:
        """Numeric class of every party, the owner included, as measured."""
        return self.admission.classes

    def class_of(self, name: str) -> str:
        """Numeric class of a party, for the log; without a guard no party is measured."""
        return self.numeric_classes.get(name, "not measured")


@dataclass
class Files:
    """The files of a run directory that the engine writes and reads."""

    run_dir: Path
    library: BuildHeldStage
    observe: Observe
    note_verified: NoteVerified | None = None
    """Called, right before any party updates, with the step of the verified states, their holders and digests."""
    note_checks: NoteChecks | None = None
    """Called with what was checked of every step that is applied."""
    note_step: Callable[[StepRecord], None] | None = None
    """Called with the proof of each step, once it is applied and audited."""
    states: StateFiles | None = None
    """Where the owner keeps the states of its own stages."""
    gone: list[str] = field(default_factory=list)
