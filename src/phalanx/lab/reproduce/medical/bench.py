"""The material of an arm of the comparison, and its result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from phalanx.lab.reproduce.medical.front import RememberedFront
from phalanx.lab.reproduce.medical.material import Indices, Material, deal_rows
from phalanx.lab.reproduce.medical.size import MedicalSize
from phalanx.models import ModelSource, StageModule, weights_digest
from phalanx.objectives import ConfusionMatrix
from phalanx.split import BackTrainer, Classification, Front, build_back

_ROWS_TESTED_AT_ONCE = 32


@dataclass(frozen=True)
class ArmResult:
    """The result of an arm.

    Attributes:
        steps: Steps of the optimizer that counts: of one client, where several train apart.
        loss_last: Mean loss of the last step; None where there is no such step.
        digest: Digest of adapters and head at the end; None without them.
    """

    scores: tuple[ConfusionMatrix, ...]
    steps: int = 0
    loss_last: float | None = None
    digest: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ArmMaterial:
    """The material of an arm: model, front, texts and clients.

    Attributes:
        front: Its front, in float32.
        clip: Length to which the noised split clips a token's hidden states.
    """

    source: ModelSource
    front: RememberedFront
    clip: float
    material: Material
    size: MedicalSize
    seed: int

    @property
    def classification_task(self) -> Classification:
        """Head and loss."""
        return Classification(self.material.num_classes)

    @property
    def arm_steps(self) -> int:
        """Steps of an arm that learns from one microbatch of every client in each."""
        rows = self.size.rows * len(self.material.clients)
        return max(1, self.size.epochs * len(self.material.train.classes) // rows)

    def make_trainer(self) -> BackTrainer:
        """A back part with fresh adapters and head, the same for every arm of a seed."""
        back = build_back(self.source, self.size.cut, adapter=self.size.adapter_config, seed=self.seed)
        return BackTrainer(back, self.classification_task, self.size.optimizer_config, self.arm_steps, self.seed)

    def hidden_and_labels(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return hidden states in float32 and labels, for an arm that has both front and back."""
        ids, labels = self.material.train.pick_rows(indices)
        return self.front(ids), labels

    def deal_microbatches(self, indices: Indices, client: int) -> Iterator[Indices]:
        """A client's microbatches."""
        return deal_rows(indices, self.size.rows, self.seed, client)

    def score_back(self, back: StageModule, front: Front) -> ConfusionMatrix:
        """Count the back part's predictions on the test texts."""
        test = self.material.test
        predicted: list[int] = []
        for begin in range(0, len(test.classes), _ROWS_TESTED_AT_ONCE):
            ids, labels = test.pick_rows(range(begin, min(begin + _ROWS_TESTED_AT_ONCE, len(test.classes))))
            predicted += self.classification_task.predict_classes(back, front(ids), labels)
        return ConfusionMatrix.count_answers(predicted, test.classes, self.material.num_classes)

    def learn_step(self, trainer: BackTrainer, microbatches: Sequence[Indices]) -> float:
        """Learn from some microbatches and take a step; return the mean loss."""
        loss, targets = 0.0, 0
        for indices in microbatches:
            batch_loss, count = trainer.learn_microbatch(*self.hidden_and_labels(indices))
            loss, targets = loss + batch_loss, targets + count
        trainer.step()
        return loss / targets

    def make_result(
        self,
        trainer: BackTrainer,
        front: Front,
        steps: int,
        loss: float,
        more: Mapping[str, Any] | None = None,
    ) -> ArmResult:
        """Return the result of an arm that ends with one trainer."""
        digest = weights_digest(trainer.trained_weights())
        return ArmResult((self.score_back(trainer.back, front),), steps, loss, digest, more or {})


def copy_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state that later steps do not change."""
    return {name: value.clone() for name, value in state.items()}
