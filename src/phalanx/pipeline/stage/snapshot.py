"""Snapshots at a shadow with upkeep `snapshot`: states of a stage on the host, and nothing that computes with them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.errors import StaleReplicaError
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.messages import StateDigest
from phalanx.pipeline.protocol.tensor_stream import BulkReceiver, tensors_digest
from phalanx.pipeline.stage.stage_copy import StageCopy, state_digest
from phalanx.transport import SignedHeader


class KeptStage:
    """One stage's state after the last common step; while the next one is handed over, that one too.

    Costs 12 bytes per trained number, twice that while a snapshot is handed over, and frozen weights once.

    Attributes:
        index: The stage's number.
        verified: Optimizer steps that are known here to be verified.
        parts: Headers of the transfer under way, or of the last one.
        source: The party that began it.
    """

    def __init__(self, plan: StepPlan, stage: int) -> None:
        self.index = stage
        self.verified = 0
        self.parts: list[SignedHeader] = []
        self.source = ""
        self._plan = plan
        whole, moving = StageCopy.empty(plan, stage), set[str]()
        moving = set(whole.optimizer.state())
        self._expected = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in whole.state().items()
        }
        self._moving = {name: tensor for name, tensor in self._expected.items() if name in moving}
        self._frozen: dict[str, Tensor] = {}
        self._frozen_digest = ""
        self._states: dict[int, Mapping[str, Tensor]] = {}
        self._incoming: BulkReceiver | None = None

    def state(self) -> Mapping[str, Tensor]:
        """Names, shapes and types of the whole state; they hold no values."""
        return self._expected

    def load(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Begin with a whole state, frozen weights included; the tensors are kept, not copied."""
        self._frozen = {name: tensor for name, tensor in tensors.items() if name not in self._moving}
        self._frozen_digest = tensors_digest(self._frozen)
        self._states = {num_steps: {name: tensors[name] for name in self._moving}}
        self.verified = num_steps

    def restart(self, source: str) -> None:
        """Forget what has come of a transfer so far: `source` begins it."""
        self._incoming, self.source = None, source
        self.parts.clear()

    def add(self, step: int, offset: int, total: int, payload: memoryview) -> bool:
        """Take the next part of the snapshot of a step.

        Returns:
            Whether it is whole now.

        Raises:
            FrameError: The part does not follow the last one, or is not as long as it must be.
        """
        if self._incoming is None:
            self._incoming = BulkReceiver(self._moving)
        found = self._incoming.add(offset, total, payload)
        if found is None:
            return False
        self._states[step], self._incoming = found, None
        return True

    def has(self, step: int) -> bool:
        """Whether the state after so many steps is here."""
        return step in self._states

    def moving(self, step: int) -> Mapping[str, Tensor]:
        """Trained weights and moments after so many steps.

        Raises:
            StaleReplicaError: They are not kept.
        """
        if step not in self._states:
            raise StaleReplicaError(f"stage {self.index}: no snapshot of step {step}; kept are {sorted(self._states)}")
        return self._states[step]

    def digest(self, step: int) -> StateDigest:
        """Digest of the state after so many steps.

        Raises:
            StaleReplicaError: It is not kept.
        """
        return state_digest(self.moving(step), self._frozen_digest, step)

    def build(self, step: int) -> StageCopy:
        """A copy that can serve the stage from this step on.

        Raises:
            StaleReplicaError: That state is not kept.
        """
        copy = StageCopy.empty(self._plan, self.index)
        copy.load({**self._frozen, **self.moving(step)}, step)
        return copy

    def applied(self, step: int) -> None:
        """Note that step `step` (from 0) is verified: a snapshot of it is the company's, and older ones are dropped."""
        self.verified, self.source = step + 1, ""
        if self.has(step):
            self._keep_only(step)

    def begin(self, step: int) -> None:
        """Begin at this step, as all parties do.

        Raises:
            StaleReplicaError: Its state is not kept.
        """
        self.moving(step)
        self.verified = step
        self.restart("")
        self._keep_only(step)

    def _keep_only(self, step: int) -> None:
        self._states = {step: self._states[step]}
