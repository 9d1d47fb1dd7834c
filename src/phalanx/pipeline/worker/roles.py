"""The context that the parts of a party share; and its roles, the stages that it holds and shadows in each epoch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from phalanx.checkpoint.state_files import StateFiles
from phalanx.errors import FrameError, NoHolderError
from phalanx.pipeline.assignment.assignment import Assignment, assignment_of
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.messages import Assign, Bulk, Fetch, FetchBulk, MessageKey, NoiseKeys, Role
from phalanx.pipeline.protocol.signed import StatementReader
from phalanx.pipeline.protocol.tensor_stream import BulkReceiver, Post, send_bulk
from phalanx.pipeline.stage.stage_copy import StageCopy, WrapCopy, leave_unwrapped
from phalanx.pipeline.worker.stages import HostedStage, ShadowStage
from phalanx.security.privacy import SEED_BYTES
from phalanx.telemetry import PhaseTimer


@dataclass(frozen=True)
class TrainedState:
    """The trained tensors of a stage, ``weight/...`` and moments, and the optimizer steps that led to them."""

    tensors: Mapping[str, Tensor]
    num_steps: int


@runtime_checkable
class BuildHeldStage(Protocol):
    """Where the owner reads a stage that no party holds yet: a model directory or a checkpoint."""

    def __call__(self, stage: int, trained: TrainedState | None = None, /) -> StageCopy:
        """Build a stage; with another trained state than its own, where one is passed."""


Usage = Callable[[], tuple[dict[str, float], dict[str, int]]]
"""Running costs: seconds by purpose, and bytes of frames by receiver."""


@dataclass(frozen=True)
class PartyContext:
    """What the parts of a party share; made once, before any of them.

    Attributes:
        post: Sends a message; one to oneself is delivered to oneself.
        wrap_copy: Wraps honest copies, for attackers in a drill.
        usage: Read when the party reports an applied step.
        state_files: Where states of held stages are kept; None where they are not.
    """

    name: str
    plan: StepPlan
    post: Post
    statements: StatementReader
    timer: PhaseTimer
    wrap_copy: WrapCopy = leave_unwrapped
    usage: Usage = lambda: ({}, {})
    state_files: StateFiles | None = None

    @property
    def is_guarded(self) -> bool:
        """Whether anything is committed to, audited or shadowed."""
        return self.plan.guard.is_enabled


class Roles:
    """The copies of one party; `take` moves them to a new assignment with as little traffic as possible."""

    def __init__(self, context: PartyContext, library: BuildHeldStage | None = None) -> None:
        """`library`: the owner's alone."""
        self.name = context.name
        self.epoch = -1
        self.step = 0
        self.assignment = Assignment({}, {})
        self.hosted: dict[int, HostedStage] = {}
        self.shadows: dict[int, ShadowStage] = {}
        self.given_up: tuple[dict[int, HostedStage], dict[int, ShadowStage]] = ({}, {})
        """What was held and shadowed and is in other hands now, until a step has ended well without it."""
        self.noise_keys: dict[int, bytes] = {}
        """Keys of the noise of this epoch, by stage; none where rows are not hidden."""
        self.awaited_tensors: dict[tuple[int, MessageKey], tuple[str, Fetch]] = {}
        """Tensors that this party has not sent yet, by step, with the auditor that asked for each."""
        self.loading: dict[int, tuple[StageCopy, BulkReceiver, str]] = {}
        self.library = library
        self._kept_library: BuildHeldStage | None = None
        self._context = context

    def take_assignment(self, assign: Assign) -> None:
        """Move to a new epoch: promote, drop, build; send state to newcomers and wait for one's own."""
        # what was given up in a change of roles that may have failed
        self.hosted.update(self.given_up[0])
        self.shadows.update(self.given_up[1])
        self.forget_given_up()
        self.epoch, self.step = assign.epoch, assign.step
        self.assignment = assignment_of(assign.roles)
        self.loading.clear()
        self.noise_keys.clear()
        self.awaited_tensors.clear()
        before = (dict(self.hosted), dict(self.shadows))
        for role in assign.roles:
            if self.name in role.newcomers:
                # a copy that cannot go back to the step counts as none
                self.hosted.pop(role.stage, None)
                self.shadows.pop(role.stage, None)
        self._drop_and_promote()
        for role in assign.roles:
            is_mine = self.name in self.assignment.parties_of(role.stage)
            if is_mine and role.stage not in {**self.hosted, **self.shadows}:
                self._build_copy(role)
        for mine in self.all_copies():
            if mine.stage_index not in self.loading:
                mine.copy.rewind_to(assign.step)
        for holder in self.hosted.values():
            holder.discard_inputs()
        for shadow in self.shadows.values():
            shadow.reset_step()
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
        if self._context.plan.privacy is None or self.noise_keys or {*message.stages} != mine or not is_whole:
            raise FrameError(
                f"{self.name}: noise keys of stages {list(message.stages)} in {payload.nbytes} bytes; expected one of "
                f"{SEED_BYTES} bytes for each of {sorted(mine)}, once an epoch"
            )
        for place, stage in enumerate(message.stages):
            self.noise_keys[stage] = bytes(payload[place * SEED_BYTES : (place + 1) * SEED_BYTES])

    def add_state(self, sender: str, message: Bulk, payload: memoryview) -> bool:
        """Take a part of a state that this party waits for; True when a copy became complete."""
        if message.stage not in self.loading:
            raise FrameError(f"{self.name}: {sender!r} sent the state of stage {message.stage}, which was not expected")
        copy, receiver, source = self.loading[message.stage]
        if sender != source:
            raise FrameError(
                f"{self.name}: state of stage {message.stage} from {sender!r}; expected it from {source!r}"
            )
        tensors = receiver.add_part(message.offset, message.total, payload)
        if tensors is None:
            return False
        copy.load_tensors(tensors, message.step)
        del self.loading[message.stage]
        return True

    def parties_awaited(self) -> set[str]:
        """Parties from which this party still waits for a state."""
        return {source for _, _, source in self.loading.values()}

    def keep_state(self, stage: int) -> None:
        """Keep the state of a stage on disk, where this party holds it."""
        files = self._context.state_files
        if files is not None and self.assignment.holders.get(stage) == self.name and stage in self.hosted:
            copy = self.hosted[stage].copy
            files.keep_state(stage, copy.step_count, copy.optimizer.state_tensors())

    def all_copies(self) -> list[HostedStage | ShadowStage]:
        """Every copy that this party has, in order of stages."""
        stages: dict[int, HostedStage | ShadowStage] = {**self.shadows, **self.hosted}
        return [stages[stage] for stage in sorted(stages)]

    def copy_of(self, stage: int) -> StageCopy:
        """This party's copy of a stage, held or shadowed."""
        hosted = self.hosted.get(stage) or self.shadows.get(stage)
        if hosted is None:
            raise NoHolderError(
                f"{self.name} has no copy of stage {stage}; it has {sorted({**self.hosted, **self.shadows})}"
            )
        return hosted.copy

    def begin_anew(self, library: BuildHeldStage) -> None:
        """Drop all stages, as these states are of another timeline, and build further ones from this library."""
        for mine in (self.hosted, self.shadows, self.loading):
            mine.clear()
        self.forget_given_up()
        self.library = library

    def use_kept_library(self, library: BuildHeldStage | None) -> None:
        """Build stages as all parties are to have them, whatever they have now: the owner's alone, in a rollback."""
        self._kept_library = library

    def _give_up(self, held: dict[int, HostedStage], shadowed: dict[int, ShadowStage]) -> None:
        mine = {*self.hosted, *self.shadows}
        self.given_up = (
            {stage: holder for stage, holder in held.items() if stage not in mine},
            {stage: shadow for stage, shadow in shadowed.items() if stage not in mine},
        )

    def forget_given_up(self) -> None:
        """The change of roles went well: free what others have."""
        self.given_up = ({}, {})

    def _drop_and_promote(self) -> None:
        demoted = {}
        for stage in [stage for stage in self.hosted if self.assignment.holders.get(stage) != self.name]:
            copy = self.hosted.pop(stage).copy
            if self.name in self.assignment.shadows_of(stage):
                demoted[stage] = copy
        for stage in [stage for stage in self.shadows if self.name not in self.assignment.shadows_of(stage)]:
            shadow = self.shadows.pop(stage)
            if self.assignment.holders.get(stage) == self.name:
                shadow.copy.runner.abandon_step()
                self.hosted[stage] = HostedStage(self._context.plan, self._context.wrap_copy(shadow.copy, True))
        for stage, copy in demoted.items():
            copy.runner.abandon_step()
            self.shadows[stage] = ShadowStage(self._context.wrap_copy(copy, False))

    def _build_copy(self, role: Role) -> None:
        is_held = role.holder == self.name
        library = self._kept_library or self.library
        bare = library(role.stage) if role.source == self.name and library is not None else None
        copy = self._context.wrap_copy(bare or StageCopy.build_empty(self._context.plan, role.stage), is_held)
        if bare is None:
            self.loading[role.stage] = (copy, BulkReceiver(copy.state_tensors()), role.source)
        if is_held:
            self.hosted[role.stage] = HostedStage(self._context.plan, copy)
        else:
            self.shadows[role.stage] = ShadowStage(copy)

    def _send_state(self, role: Role, before: HostedStage | ShadowStage | None) -> None:
        targets = [name for name in role.newcomers if name != self.name]
        if role.source != self.name or not targets:
            return
        if role.stage in {**self.hosted, **self.shadows}:
            copy = self.copy_of(role.stage)
        elif self._kept_library is not None:
            copy = self._kept_library(role.stage)
        elif before is not None:
            copy = before.copy
        elif self.library is not None:
            copy = self.library(role.stage)
        else:
            raise NoHolderError(f"{self.name} must send stage {role.stage} but has no copy of it")
        request = FetchBulk(epoch=self.epoch, step=copy.step_count, stage=role.stage, purpose="state")
        for target in targets:
            send_bulk(self._context.post, target, request, copy.state_tensors(), copy.step_count)
