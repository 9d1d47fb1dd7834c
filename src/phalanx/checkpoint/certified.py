"""Certified checkpoints, by the signed audit log: it finds an older one in the place of a newer one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import CheckpointError


@dataclass
class CertifiedCheckpoints:
    """The checkpoints that a run's events certify: those of the whole log on resume, then those of the present session.

    Attributes:
        saved: Digest of the signed manifest of every checkpoint that is on disk according to the log, by step.
    """

    saved: dict[int, str] = field(default_factory=dict)
    _announced: set[int] = field(default_factory=set)

    def take(self, kind: str, body: Mapping[str, Any]) -> None:
        """Follow one event; others than those about checkpoints change nothing.

        Raises:
            KeyError: It lacks what such an event has.
        """
        if kind == "checkpoint":
            self._announced.add(body["step"])
        elif kind == "checkpoint_saved":
            kept = {**self.saved, body["step"]: body["manifest"]}
            self.saved = {step: kept[step] for step in body["kept"] if step in kept}
        elif kind == "rolled_back":
            self._forget_after(body["to"])
        elif kind == "older_accepted":
            self._forget_after(body["step"])

    @property
    def newest(self) -> int | None:
        """Step of the newest one; None when there is none."""
        return max(self.saved, default=None)

    def check(self, step: int | None, manifest: str | None, where: str) -> None:
        """Compare the newest checkpoint that was found with the log.

        Args:
            step: Of the one that was found; None when there is none.
            manifest: Digest of its signed manifest.
            where: For messages.

        Raises:
            CheckpointError: It is older than the log says, or of another writing of its step, or the log
                never announced a checkpoint of its step.
        """
        newest = self.newest
        if newest is not None and (step is None or step < newest):
            found = "none is there" if step is None else f"the newest is of step {step}"
            raise CheckpointError(
                f"{where}: rolled back: {found}, the audit log has one of step {newest}; put it back, or go back "
                "on purpose with --resume --from-step STEP"
            ).about(code="PHX-I053")
        if step is None:
            return
        if step in self.saved and manifest != self.saved[step]:
            raise CheckpointError(
                f"{where}: swapped: the manifest of step {step} has digest {manifest!s:.12}..., the audit log says "
                f"{self.saved[step]:.12}...; an earlier writing of this step was put in its place"
            ).about(code="PHX-I053")
        if newest is not None and step > newest and step not in self._announced:
            raise CheckpointError(
                f"{where}: foreign: the audit log knows of no checkpoint of step {step}; remove it"
            ).about(code="PHX-I053")

    def _forget_after(self, step: int) -> None:
        self.saved = {saved: manifest for saved, manifest in self.saved.items() if saved <= step}
