"""States on the owner's disk: every stage as it was before every so many steps, for a run that has to go back."""

import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from safetensors.torch import load
from torch import Tensor

from phalanx.checkpoint.sealed import FilePlace, FileSealer
from phalanx.checkpoint.stream import safetensors_pieces
from phalanx.errors import VerificationError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.owner.step_log import StageState
from phalanx.pipeline.protocol.messages import FetchBulk, StateDigest
from phalanx.pipeline.protocol.needs import TensorsNeed, owner_task
from phalanx.pipeline.stage.stage_copy import StageCopy, trained_shapes
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.worker.roles import BuildHeldStage, Roles, TrainedState


@dataclass(frozen=True)
class KeptPoint:
    """All stages as they were before one step.

    Attributes:
        digests: Digest of each stage of another party; all parties begin with them when the run goes back.
        sealer: Under a key of this point alone.
        files: One for each stage; none where the stages are the model's.
    """

    step: int
    digests: Mapping[int, StateDigest]
    sealer: FileSealer = field(default_factory=lambda: FileSealer(os.urandom(32)), repr=False)
    files: dict[int, IO[bytes]] = field(default_factory=dict, repr=False)

    def close(self) -> None:
        """Give the disk back."""
        for file in self.files.values():
            file.close()
        self.files.clear()


class KeptStates:
    """The states that a run goes back to; parties may die or lie, these stay.

    A state is fetched once from its holder, or from the shadow where that does not bring it, and counts only with the
    digest that both had signed. Of older points one or two stay of each octave of ages: a run goes back at most
    three times as far as it has to and a point more, and of n points it keeps some log2 n.

    Each lies in a file without a name, under a key that is in this process alone: nothing of it outlives the session,
    and no plain number reaches the disk. Costs 12 bytes per trained number and point on the owner's disk; in memory one
    stage at a time.

    Args:
        roles: The owner's own stages, and the library that built them.
    """

    def __init__(self, facts: StepFacts, roles: Roles, directory: Path) -> None:
        self._facts = facts
        self._roles = roles
        self._directory = directory
        self._every = facts.plan.guard.keep_states
        self._points: dict[int, KeptPoint] = {}
        self._library: BuildHeldStage | None = None

    def begin_keeping(self, step: int, digests: Mapping[int, StateDigest]) -> None:
        """Keep the state that a session, or what follows a fallback, begins with; that of a model is in its files.

        Args:
            digests: Digests of the stages, as the owner knows them.
        """
        self.forget_after(-1)
        self._library = self._roles.library
        if not self._every or self._library is None:
            return
        point = KeptPoint(step, dict(digests))
        self._points[step] = point
        if step:
            # what it was read from may be gone when it is needed
            for stage in range(len(self._facts.plan.stages)):
                if not self._write_stage(point, stage, self._library(stage).optimizer.state_tensors()):
                    return

    def __contains__(self, step: int) -> bool:
        return step in self._points

    def is_due(self, step: int) -> bool:
        """Whether the state before a step is to be kept, and is not yet."""
        return bool(self._every) and step % self._every == 0 and all(step > point for point in self._points)

    @owner_task
    async def keep_state(self, step: int, oldest: int) -> tuple[str, str] | None:
        """Keep the agreed state before a step.

        Args:
            step: The next one; all states before it are agreed on.
            oldest: The first step with a batch that is remembered; nothing goes back behind it.

        Returns:
            The holder that did not bring a stage, when no other party brought it either, and why; None when all is
            kept, or the disk has refused, which the event `state_not_kept` says.
        """
        facts, digests = self._facts, dict(self._facts.agreed_states)
        for stage in set(facts.assignment.held_by(OWNER)) & set(range(1, len(facts.plan.stages) - 1)):
            digests[stage] = self._roles.copy_of(stage).compute_digest()
        point = KeptPoint(step, digests)
        for stage, holder in sorted(facts.assignment.holders.items()):
            if holder == OWNER:
                tensors: Mapping[str, Tensor] | None = self._roles.copy_of(stage).optimizer.state_tensors()
            else:
                tensors = await self._fetch_state(stage, facts.assignment.parties_of(stage))
            if tensors is None:
                point.close()
                return holder, f"stage {stage}: {holder} did not send its signed state, and neither did a shadow"
            if not self._write_stage(point, stage, tensors):
                return None
        self._points[step] = point
        for needless in [point for point in self._points if point < oldest or not self._is_retained(point)]:
            self._points.pop(needless).close()
        return None

    def _is_retained(self, step: int) -> bool:
        """Whether a point is the first one, one of the last two, or one of the few that stay of its octave of ages."""
        place, age = step // self._every, max(self._points) // self._every - step // self._every
        return step == min(self._points) or age < 2 or place % (1 << (age.bit_length() - 1)) == 0

    def point_before(self, step: int, oldest: int) -> int | None:
        """The last kept point up to a step; the first one where none is so old, and None without any.

        Args:
            oldest: The first step with a batch that is remembered.
        """
        usable = sorted(point for point in self._points if point >= oldest)
        return max((point for point in usable if point <= step), default=min(usable, default=None))

    def point_digests(self, step: int) -> Mapping[int, StateDigest]:
        """The digests of a kept point."""
        return self._points[step].digests

    def point_library(self, step: int) -> BuildHeldStage:
        """Build stages as they were at a kept point."""
        point, base = self._points[step], self._library

        def build(stage: int, trained: TrainedState | None = None) -> StageCopy:
            if base is None:
                raise VerificationError(f"stage {stage}: the owner has no model to build it from")
            return base(stage) if not point.files else base(stage, trained or self._read_stage(point, stage))

        return build

    def forget_after(self, step: int) -> None:
        """Let go of states of later steps: they were undone."""
        for late in [point for point in self._points if point > step]:
            self._points.pop(late).close()

    async def _fetch_state(self, stage: int, parties: tuple[str, ...]) -> dict[str, Tensor] | None:
        facts = self._facts
        step, agreed, shapes = facts.ledger.step, facts.agreed_states.get(stage), trained_shapes(facts.plan, stage)
        for party in parties:
            if party == OWNER:
                return dict(self._roles.copy_of(stage).optimizer.state_tensors())
            request = FetchBulk(epoch=facts.ledger.epoch, step=step, stage=stage, purpose="snapshot")
            tensors = await TensorsNeed(party, request, shapes)
            try:
                if tensors is not None:
                    StageState(stage, party, tensors[0], step, agreed).check_digest()
                    return tensors[0]
            except VerificationError as exc:
                facts.observe("refused", {"party": party, "error": type(exc).__name__, "reason": str(exc)})
        return None

    def _write_stage(self, point: KeptPoint, stage: int, tensors: Mapping[str, Tensor]) -> bool:
        """Put one stage on the disk; False when that refuses, and the point is given up."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = point.files[stage] = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - kept open
            # whatever becomes of the run, its disk is given back with it
            weakref.finalize(point, file.close)
            for piece in point.sealer.seal_file(_file_place(point, stage), safetensors_pieces(tensors)):
                file.write(piece)
            file.flush()
        except OSError as exc:
            point.close()
            self._points.pop(point.step, None)
            reason = f"{self._directory}: {exc.strerror or exc}"
            self._facts.observe("state_not_kept", {"step": point.step, "reason": reason})
            return False
        return True

    def _read_stage(self, point: KeptPoint, stage: int) -> TrainedState:
        file = point.files[stage]
        file.seek(0)
        plain = point.sealer.open_file(_file_place(point, stage), file.read(), f"kept state of stage {stage}")
        return TrainedState(load(plain), point.step)


def _file_place(point: KeptPoint, stage: int) -> FilePlace:
    return FilePlace("kept", point.step, str(stage))
