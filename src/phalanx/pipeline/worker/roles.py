"""The roles of a party, the stages that it holds and shadows in each epoch; and the context that its parts share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from phalanx.checkpoint.state_files import StateFiles
from phalanx.errors import FrameError, NoHolderError
from phalanx.pipeline.assignment.assignment import Assignment, assignment_of
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.messages import Activation, Assign, Bulk, FetchBulk, NoiseKeys, PassedOnHeader, Role
from phalanx.pipeline.protocol.signed import Statement, Statements
from phalanx.pipeline.protocol.tensor_stream import BulkReceiver, Post, send_bulk
from phalanx.pipeline.stage.stage_copy import StageCopy, WrapCopy
from phalanx.pipeline.worker.stages import HostedStage, ShadowStage
from phalanx.security.privacy import SEED_BYTES
from phalanx.telemetry import PhaseTimer


@dataclass(frozen=True)
class TrainedState:
    """The trained tensors of a stage, ``weight/...`` and moments, and the optimizer steps that led to them."""

    tensors: Mapping[str, Tensor]
    num_steps: int


@runtime_checkable
class Library(Protocol):
    """Where the owner reads a stage that no party holds yet: a model directory or a checkpoint."""

    def __call__(self, stage: int, trained: TrainedState | None = None, /) -> StageCopy:
        """Build a stage; with another trained state than its own, where one is passed."""


class Roles:
    """The copies of one party; `take` moves them to a new assignment with as little traffic as possible."""

    def __init__(self, name: str, plan: StepPlan, post: Post, wrap_copy: WrapCopy) -> None:
        self.name = name
        self.epoch = -1
        self.step = 0
        self.assignment = Assignment({}, {})
        self.hosted: dict[int, HostedStage] = {}
        self.shadows: dict[int, ShadowStage] = {}
        self.given_up: tuple[dict[int, HostedStage], dict[int, ShadowStage]] = ({}, {})
        """What was held and shadowed and is in other hands now, until a step has ended well without it."""
        self.noise_keys: dict[int, bytes] = {}
        """Keys of the noise of this epoch, by stage; none where rows are not hidden."""
        self.loading: dict[int, tuple[StageCopy, BulkReceiver, str]] = {}
        self.library: Library | None = None
        self.kept_library: Library | None = None
        """The owner's alone, while a run goes back: stages as all parties are to have them, whatever they have now."""
        self.state_files: StateFiles | None = None
        self._plan = plan
        self._post = post
        self._wrap_copy = wrap_copy

    def take(self, assign: Assign) -> None:
        """Move to a new epoch: promote, drop, build; send state to newcomers and wait for one's own."""
        self._take_back()
        self.epoch, self.step = assign.epoch, assign.step
        self.assignment = assignment_of(assign.roles)
        self.loading.clear()
        self.noise_keys.clear()
        before = (dict(self.hosted), dict(self.shadows))
        self._forget_too_young(assign)
        self._drop_and_promote()
        for role in assign.roles:
            if self.name in (role.holder, role.shadow) and role.stage not in {**self.hosted, **self.shadows}:
                self._build(role)
        self._go_back(assign.step)
        for holder in self.hosted.values():
            holder.discard_inputs()
        for shadow in self.shadows.values():
            shadow.begin()
        for role in assign.roles:
            self._send_state(role, before[0].get(role.stage) or before[1].get(role.stage))
        self._give_up(*before)

    def take_noise_keys(self, message: NoiseKeys, payload: memoryview) -> None:
        """Take the keys of this epoch's noise, of exactly the stages that this party has a copy of.

        Raises:
            FrameError: They are of other stages, came before, or are not as long as keys are.
        """
        mine = set(self.assignment.copies_of(self.name))
        is_whole = payload.nbytes == SEED_BYTES * len(message.stages)
        if self._plan.privacy is None or self.noise_keys or {*message.stages} != mine or not is_whole:
            raise FrameError(
                f"{self.name}: noise keys of stages {list(message.stages)} in {payload.nbytes} bytes; expected one of "
                f"{SEED_BYTES} bytes for each of {sorted(mine)}, once an epoch"
            )
        for place, stage in enumerate(message.stages):
            self.noise_keys[stage] = bytes(payload[place * SEED_BYTES : (place + 1) * SEED_BYTES])

    def add_state(self, sender: str, message: Bulk, payload: memoryview) -> bool:
        """Take a part of a state that this party waits for; True when a copy became complete.

        Raises:
            FrameError: It is not awaited, or not the expected one.
        """
        if message.stage not in self.loading:
            raise FrameError(f"{self.name}: {sender!r} sent the state of stage {message.stage}, which was not expected")
        copy, receiver, source = self.loading[message.stage]
        if sender != source:
            raise FrameError(
                f"{self.name}: state of stage {message.stage} from {sender!r}; expected it from {source!r}"
            )
        tensors = receiver.add(message.offset, message.total, payload)
        if tensors is None:
            return False
        copy.load(tensors, message.step)
        del self.loading[message.stage]
        return True

    def owed_by(self) -> set[str]:
        """Parties from which this party still waits for a state."""
        return {source for _, _, source in self.loading.values()}

    def keep_state(self, stage: int) -> None:
        """Keep the state of a stage on disk, where this party holds it."""
        if self.state_files is not None and self.assignment.holders.get(stage) == self.name and stage in self.hosted:
            copy = self.hosted[stage].copy
            self.state_files.keep(stage, copy.step, copy.optimizer.state())

    def all(self) -> list[HostedStage | ShadowStage]:
        """Every copy that this party has, in order of stages."""
        stages: dict[int, HostedStage | ShadowStage] = {**self.shadows, **self.hosted}
        return [stages[stage] for stage in sorted(stages)]

    def copy_of(self, stage: int) -> StageCopy:
        """This party's copy of a stage, held or shadowed.

        Raises:
            NoHolderError: It has none.
        """
        hosted = self.hosted.get(stage) or self.shadows.get(stage)
        if hosted is None:
            raise NoHolderError(
                f"{self.name} has no copy of stage {stage}; it has {sorted({**self.hosted, **self.shadows})}"
            )
        return hosted.copy

    def forget_copies(self) -> None:
        """Drop all stages: all parties begin anew, and these states are of another timeline."""
        for mine in (self.hosted, self.shadows, self.loading):
            mine.clear()
        self.forget_given_up()

    def _take_back(self) -> None:
        """Take back stages that were given up in a change of roles that may have failed."""
        hosted, shadowed = self.given_up
        self.hosted.update(hosted)
        self.shadows.update(shadowed)
        self.forget_given_up()

    def _give_up(self, held: dict[int, HostedStage], shadowed: dict[int, ShadowStage]) -> None:
        mine = {*self.hosted, *self.shadows}
        self.given_up = (
            {stage: holder for stage, holder in held.items() if stage not in mine},
            {stage: shadow for stage, shadow in shadowed.items() if stage not in mine},
        )

    def forget_given_up(self) -> None:
        """The change of roles went well: free what others have."""
        self.given_up = ({}, {})

    def _forget_too_young(self, assign: Assign) -> None:
        """A copy that cannot go back to the step counts as none: its party is a newcomer."""
        for role in assign.roles:
            if self.name in role.newcomers:
                for mine in (self.hosted, self.shadows):
                    mine.pop(role.stage, None)

    def _go_back(self, step: int) -> None:
        """Bring every copy that does not wait for a state to the step at which all parties begin."""
        for mine in self.all():
            if mine.index not in self.loading:
                mine.copy.rewind(step)

    def _drop_and_promote(self) -> None:
        demoted = {}
        for stage in [stage for stage in self.hosted if self.assignment.holders.get(stage) != self.name]:
            copy = self.hosted.pop(stage).copy
            if self.assignment.shadows.get(stage) == self.name:
                demoted[stage] = copy
        for stage in [stage for stage in self.shadows if self.assignment.shadows.get(stage) != self.name]:
            shadow = self.shadows.pop(stage)
            if self.assignment.holders.get(stage) == self.name:
                shadow.copy.runner.abandon()
                self.hosted[stage] = HostedStage(self._plan, self._wrap_copy(shadow.copy, True))
        for stage, copy in demoted.items():
            copy.runner.abandon()
            self.shadows[stage] = ShadowStage(self._wrap_copy(copy, False))

    def _build(self, role: Role) -> None:
        is_held = role.holder == self.name
        library = self.kept_library or self.library
        bare = library(role.stage) if role.source == self.name and library is not None else None
        copy = self._wrap_copy(bare or StageCopy.empty(self._plan, role.stage), is_held)
        if bare is None:
            self.loading[role.stage] = (copy, BulkReceiver(copy.state()), role.source)
        if is_held:
            self.hosted[role.stage] = HostedStage(self._plan, copy)
        else:
            self.shadows[role.stage] = ShadowStage(copy)

    def _send_state(self, role: Role, before: HostedStage | ShadowStage | None) -> None:
        targets = [name for name in role.newcomers if name != self.name]
        if role.source != self.name or not targets:
            return
        if role.stage in {**self.hosted, **self.shadows}:
            copy = self.copy_of(role.stage)
        elif self.kept_library is not None:
            copy = self.kept_library(role.stage)
        elif before is not None:
            copy = before.copy
        elif self.library is not None:
            copy = self.library(role.stage)
        else:
            raise NoHolderError(f"{self.name} must send stage {role.stage} but has no copy of it")
        request = FetchBulk(epoch=self.epoch, step=copy.step, stage=role.stage, purpose="state")
        for target in targets:
            send_bulk(self._post, target, request, copy.state(), copy.step)


@dataclass(frozen=True)
class PartyContext:
    """Handed to the parts of a party.

    Attributes:
        roles: Its stages and shadows, and the present epoch and step.
        post: Sends a message; one to oneself is delivered to oneself.
        statements: Opens what others pass on.
        timer: Adds up CPU and wall time of each phase.
    """

    name: str
    plan: StepPlan
    roles: Roles
    post: Post
    statements: Statements
    timer: PhaseTimer

    def tensor(self, signed: PassedOnHeader, epoch: int, place: Mapping[str, object]) -> Statement[Activation]:
        """A tensor between stages, as its sender announced it to its receiver in the present assignment.

        Raises:
            FrameError, SignatureError: As `Statements.open`.
        """
        return self.statements.open(signed, Activation, epoch, place, self.roles.assignment.link_of)

    def find_tensor(
        self, signed: PassedOnHeader, epoch: int, place: Mapping[str, object]
    ) -> Statement[Activation] | None:
        """As `tensor`; None where that raises."""
        return self.statements.find(signed, Activation, epoch, place, self.roles.assignment.link_of)

    @property
    def guarded(self) -> bool:
        """Whether anything is committed to, audited or shadowed."""
        return self.plan.guard.enabled
