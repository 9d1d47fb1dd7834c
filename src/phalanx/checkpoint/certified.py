"""Certified checkpoints, by the signed audit log: it finds an older one in the place of a newer one."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.errors import CheckpointError


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the best validation loss of a run.

    Attributes:
        step: Number of optimizer steps that are in it.
        on: Name of the validation set.
        loss: On that set, in nats.
    """

    step: int
    on: str
    loss: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "BestCheckpoint":
        """Read it from an event."""
        step, on, loss = body["step"], body["on"], body["loss"]
        if type(step) is not int or not isinstance(on, str) or type(loss) is not float or not math.isfinite(loss):
            raise KeyError("best")
        return cls(step, on, loss)


@dataclass
class CertifiedCheckpoints:
    """The checkpoints that a run's events certify: from the whole log on resume, then from the present session.

    Attributes:
        saved: Digest of the signed manifest of every checkpoint that is on disk according to the log, by step.
        best: The one of these with the best validation; None where the run keeps none for that.
    """

    saved: dict[int, str] = field(default_factory=dict)
    best: BestCheckpoint | None = None
    _announced: set[int] = field(default_factory=set)

    def follow_event(self, kind: str, body: Mapping[str, Any]) -> None:
        """Follow one event; others than those about checkpoints change nothing."""
        if kind == "checkpoint":
            self._announced.add(body["step"])
        elif kind == "checkpoint_saved":
            manifests = {**self.saved, body["step"]: body["manifest"]}
            self.saved = {step: manifests[step] for step in body["kept"] if step in manifests}
            best = body.get("best")
            self.best = None if best is None else BestCheckpoint.from_json(best)
            self._drop_best()
        elif kind == "rolled_back":
            self._forget_after(body["to"])
        elif kind == "older_accepted":
            self._forget_after(body["step"])

    @property
    def newest_step(self) -> int | None:
        """Step of the newest one; None when there is none."""
        return max(self.saved, default=None)

    def check_newest(self, step: int | None, manifest: str | None, where: str) -> None:
        """Compare the newest checkpoint that was found with the log.

        Args:
            step: Step of the newest checkpoint; None when there is none.
            where: Name of the checkpoint in error messages.
        """
        newest = self.newest_step
        if newest is not None and (step is None or step < newest):
            state = "none exists" if step is None else f"the newest is of step {step}"
            raise CheckpointError(
                f"{where}: rolled back: {state}, the audit log has one of step {newest}; restore it, or return to "
                "the older one with --resume --from-step STEP"
            ).with_facts(code="PHX-I053")
        if step is None:
            return
        self.check_writing(step, manifest, where)
        if newest is not None and step > newest and step not in self._announced:
            raise CheckpointError(
                f"{where}: foreign: the audit log lists no checkpoint of step {step}; remove it"
            ).with_facts(code="PHX-I053")

    def check_writing(self, step: int, manifest: str | None, where: str) -> None:
        """Compare one checkpoint with the log's entry for its step, where it has one."""
        if step in self.saved and manifest != self.saved[step]:
            raise CheckpointError(
                f"{where}: swapped: the manifest of step {step} has digest {manifest!s:.12}..., the audit log says "
                f"{self.saved[step]:.12}...; an earlier version of this step replaced it"
            ).with_facts(code="PHX-I053")

    def _forget_after(self, step: int) -> None:
        self.saved = {saved: manifest for saved, manifest in self.saved.items() if saved <= step}
        self._drop_best()

    def _drop_best(self) -> None:
        if self.best is not None and self.best.step not in self.saved:
            self.best = None
