"""A stage in an attacker's hands: it computes honestly and lies about the result."""

import hashlib
import json
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from phalanx.attacks.schedule import attacks_in
from phalanx.pipeline import AttackConfig, StageRunner


class AttackedRunner(StageRunner, ABC):
    """Stands in for an honest runner; subclasses say what is sent instead.

    What was done is written to a log, one line a message, so that a drill can be compared with what
    the guard found. The log is the attacker's own and no part of the guard reads it.
    """

    def __init__(self, honest: StageRunner, config: AttackConfig, party: str, log: Path | None) -> None:
        self._honest = honest
        self.module, self.spec = honest.module, honest.spec
        self._config = config
        self._party = party
        self._log = log

    @abstractmethod
    def lie(self, direction: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """What is sent instead of `tensor` ``[batch, seq, dim]``; the tensor itself where nothing is changed."""

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        """As the honest stage, then lie."""
        return self._tamper("forward", step, microbatch, self._honest.forward(step, microbatch, x))

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """As the honest stage, then lie."""
        honest = self._honest.backward(step, microbatch, gradient)
        return None if honest is None else self._tamper("backward", step, microbatch, honest)

    def loss(self, microbatch: int, labels: Tensor, num_targets: int) -> float:
        """As the honest stage."""
        return self._honest.loss(microbatch, labels, num_targets)

    def gradients(self) -> dict[str, Tensor]:
        """As the honest stage."""
        return self._honest.gradients()

    def abandon(self) -> None:
        """As the honest stage."""
        self._honest.abandon()

    def _tamper(self, direction: str, step: int, microbatch: int, honest: Tensor) -> Tensor:
        if not attacks_in(self._config, self._party, step):
            return honest
        generator = torch.Generator().manual_seed(noise_seed(self._config.seed, self._party, step, microbatch))
        sent = self.lie(direction, honest, generator)
        if sent is not honest and self._log is not None:
            record = {
                "party": self._party,
                "stage": self.spec.index,
                "step": step,
                "microbatch": microbatch,
                "direction": direction,
            }
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        return sent


def noise_seed(seed: int, party: str, step: int, microbatch: int) -> int:
    """Seed of what one party sends instead of one message; the same on every machine and Python."""
    text = f"phalanx attack noise {seed} {party} {step} {microbatch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
