"""The members of a run besides the owner, and the files that the engine reads and writes in a run directory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.checkpoint.state_files import StateFiles
from phalanx.pipeline.assignment.memory import Rooms
from phalanx.pipeline.membership.admission import Admission
from phalanx.pipeline.membership.incarnations import Incarnations
from phalanx.pipeline.proof.step_record import NoteChecks, StepRecord
from phalanx.pipeline.protocol.greetings import Hello
from phalanx.pipeline.protocol.log_memory import LogHeadExchange, Observe
from phalanx.pipeline.protocol.messages import StateDigest
from phalanx.pipeline.worker.roles import Library
from phalanx.security.crypto import certified_name
from phalanx.transport import LinkFault

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
    rooms: dict[str, Rooms] = field(default_factory=dict)
    """Memory of every party, the owner included, as each reported when it came; one that is not in it has no limit."""
    authority: str = ""
    """PEM of the authority that issued the certificates; goes into evidence."""
    is_alive: Callable[[str], bool] = lambda name: True
    dismiss: Callable[[str], None] = lambda name: None
    """Ends a local worker's process; nothing for a remote one."""
    replace: Callable[[str], None] = lambda name: None
    """Starts another local worker in the place of one that is gone, if the run file allows it."""
    returns: int = 0
    """How often one that was lost or has left may come back in this session."""
    rebalance_every: int = 0
    """Steps over which every worker's pace is measured, for stages to move away from slow ones; 0: they stay."""
    unreachable: Sequence[LinkFault] = ()
    """Links that failed before the engine could hear of it."""
    incarnations: Incarnations | None = None
    """The incarnations so far, where they were counted; told of later ones from now on."""
    witnesses: LogHeadExchange = field(default_factory=LogHeadExchange)
    """Tells what is remembered of the owner's audit log, and heeds it."""
    look_after: Callable[[], None] = lambda: None
    """Does the same for a local worker that ended before it joined; called whenever there is nothing else to do."""

    def add_incarnation(self, name: str) -> None:
        """Note that a known party has begun another incarnation, under the same certificate."""
        self.certificates = {**self.certificates, name: self.certificates[certified_name(name)]}

    @property
    def classes(self) -> dict[str, str]:
        """Numeric class of every party, the owner included, as measured."""
        return self.admission.classes

    def class_of(self, name: str) -> str:
        """Numeric class of a party, for the log; without a guard no party is measured."""
        return self.classes.get(name, "not measured")

    def admit(self, name: str, hello: Hello) -> None:
        """Let a party in that came late and was measured."""
        self.addresses[name], self.rooms[name] = hello.address, hello.memory


@dataclass
class Files:
    """The files of a run directory that the engine writes and reads."""

    run_dir: Path
    library: Library
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
