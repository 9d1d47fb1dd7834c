"""The arms of the comparison: which party trains on which texts, and what crosses; one function and one line each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.data.tasks import Example, tfidf_predictions
from phalanx.lab.reproduce.medical.front import NoisyFront, RememberedFront
from phalanx.lab.reproduce.medical.material import Indices, Material, deal
from phalanx.lab.reproduce.medical.size import NOISE, MedicalSize
from phalanx.models import ModelSource, StageModule, weights_digest
from phalanx.objectives import Confusion
from phalanx.split import BackTrainer, Classification, Front, SplitConfig, SplitScenario, SplitSimulator, build_back
from phalanx.split.masked import MaskedConfig, MaskingClient, SimulatedWorker, mask_linears, process_pads

_ROWS_TESTED_AT_ONCE = 32
WIRE: Literal["bf16"] = "bf16"
"""The precision in which hidden states leave a client; what never leaves stays float32."""


@dataclass(frozen=True)
class ArmMaterial:
    """The material of an arm: model, front, texts and clients.

    Attributes:
        source: The model, cut down to the layers that are used.
        front: Its front, in float32.
        clip: Length to which the noised split clips a token's hidden states.
        material: Texts and clients.
        size: How much is trained.
        seed: Of everything that is drawn.
    """

    source: ModelSource
    front: RememberedFront
    clip: float
    material: Material
    size: MedicalSize
    seed: int

    @property
    def task(self) -> Classification:
        """Head and loss."""
        return Classification(self.material.num_classes)

    @property
    def steps(self) -> int:
        """Steps of an arm that learns from one microbatch of every client in each."""
        rows = self.size.rows * len(self.material.clients)
        return max(1, self.size.epochs * len(self.material.train.classes) // rows)

    def trainer(self) -> BackTrainer:
        """A back part with fresh adapters and head, the same for every arm of a seed."""
        back = build_back(self.source, self.size.cut, adapter=self.size.adapter, seed=self.seed)
        return BackTrainer(back, self.task, self.size.optimizer, self.steps, self.seed)

    def microbatch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return hidden states in float32 and labels, for an arm that has both front and back."""
        ids, labels = self.material.train.pick(indices)
        return self.front(ids), labels

    def dealt(self, indices: Indices, client: int) -> Iterator[Indices]:
        """A client's microbatches."""
        return deal(indices, self.size.rows, self.seed, client)

    def score(self, back: StageModule, front: Front) -> Confusion:
        """Count what the back part makes of the test texts."""
        test = self.material.test
        predicted: list[int] = []
        for begin in range(0, len(test.classes), _ROWS_TESTED_AT_ONCE):
            ids, labels = test.pick(range(begin, min(begin + _ROWS_TESTED_AT_ONCE, len(test.classes))))
            predicted += self.task.predict(back, front(ids), labels)
        return Confusion.of(predicted, test.classes, self.material.num_classes)


@dataclass(frozen=True)
class ArmResult:
    """The result of an arm.

    Attributes:
        scores: One, or one for each client that trained alone.
        steps: Steps of the optimizer that counts: of one client, where several train apart.
        loss_last: Mean loss of the last step; None where there is no such step.
        digest: Of adapters and head at the end; None where there are none.
        more: Figures that only this arm has.
    """

    scores: tuple[Confusion, ...]
    steps: int = 0
    loss_last: float | None = None
    digest: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


Arm = Callable[[ArmMaterial], ArmResult]


def tfidf(bench: ArmMaterial) -> ArmResult:
    """TF-IDF and logistic regression on whole texts: no model at all."""
    return _tfidf(bench, bench.material.train_examples, bench.material.test_examples)


def tfidf_cut(bench: ArmMaterial) -> ArmResult:
    """The same on as much of each text as the model is shown."""
    return _tfidf(bench, bench.material.train_cut, bench.material.test_cut)


def centralised(bench: ArmMaterial) -> ArmResult:
    """Train with all texts in one place: as many rows a step as the split takes from all clients together."""
    trainer = bench.trainer()
    (everything,) = bench.material.all_at_once
    dealt = bench.dealt(everything, 0)
    loss = 0.0
    for _ in range(bench.steps):
        loss = _step(bench, trainer, [next(dealt) for _ in bench.material.clients])
    return _finished(bench, trainer, bench.front, bench.steps, loss)


def local(bench: ArmMaterial) -> ArmResult:
    """Every client trains alone on what it has, in as many passes; all are tested on the common test texts."""
    trainer = bench.trainer()
    first = _copy(trainer.state())
    scores = []
    for client, indices in enumerate(bench.material.clients):
        trainer.load_state(first, 0)
        dealt = bench.dealt(indices, client)
        for _ in range(max(1, bench.size.epochs * len(indices) // bench.size.rows)):
            _step(bench, trainer, [next(dealt)])
        scores.append(bench.score(trainer.back, bench.front))
    return ArmResult(tuple(scores), more={"client_accuracy": [score.accuracy for score in scores]})


def fedavg(bench: ArmMaterial) -> ArmResult:
    """Rounds of one local pass each; then adapters and head are averaged by the clients' numbers of texts.

    A and B are averaged apart, as FedAvg does with parameters, and each round begins with fresh moments.

    Source: McMahan et al. 2017, algorithm 1.
    """
    trainer, clients = bench.trainer(), bench.material.clients
    common = _copy(trainer.state())
    dealt = [bench.dealt(indices, client) for client, indices in enumerate(clients)]
    shares = [len(indices) / sum(map(len, clients)) for indices in clients]
    loss = steps = 0.0
    for _ in range(bench.size.epochs):
        mean = {name: torch.zeros_like(value) for name, value in common.items()}
        loss = 0.0
        for share, microbatches, indices in zip(shares, dealt, clients, strict=True):
            trainer.load_state(common, 0)
            count = max(1, len(indices) // bench.size.rows)
            last = 0.0
            for _ in range(count):
                last = _step(bench, trainer, [next(microbatches)])
            loss, steps = loss + share * last, steps + share * count
            for name, value in trainer.state().items():
                mean[name].add_(value, alpha=share if name.startswith("weight/") else 0.0)
        common = mean
    trainer.load_state(common, 0)
    return _finished(bench, trainer, bench.front, round(steps), loss, {"rounds": bench.size.epochs})


def split_plain(bench: ArmMaterial) -> ArmResult:
    """The split engine with frames that the host can read."""
    return _split(bench, _plain_config(bench), bench.front.with_wire(WIRE))


def split_noised(bench: ArmMaterial) -> ArmResult:
    """Train the plain split with clients that clip and noise what leaves them: the guard without an enclave.

    The test texts are noised as well, for every client that asks the model sends its text in the same way.
    """
    front = NoisyFront(bench.front, bench.clip, NOISE, bench.seed, WIRE)
    return _split(bench, _plain_config(bench), front)


def split_sealed(bench: ArmMaterial) -> ArmResult:
    """The split engine with attestation (of the simulated tier), key agreement and sealed frames."""
    return _split(bench, _sealed_config(bench), bench.front.with_wire(WIRE))


def split_masked(bench: ArmMaterial) -> ArmResult:
    """Train the sealed split with an enclave that leaves its frozen linear layers, masked, to an untrusted worker."""

    def mask(back: StageModule) -> None:
        config = MaskedConfig(rows=bench.size.rows * bench.size.tokens)
        mask_linears(back, MaskingClient(SimulatedWorker(), process_pads("reproduce-medical"), config))

    return _split(bench, _sealed_config(bench), bench.front.with_wire(WIRE), mask)


ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        "tfidf": tfidf,
        "tfidf_cut": tfidf_cut,
        "centralised": centralised,
        "local": local,
        "fedavg": fedavg,
        "split_plain": split_plain,
        "split_sealed": split_sealed,
        "split_noised": split_noised,
        "split_masked": split_masked,
    }
)
"""In the order in which they are shown."""


def _tfidf(bench: ArmMaterial, train: Sequence[Example], test: Sequence[Example]) -> ArmResult:
    predicted = tfidf_predictions(train, test, bench.seed)
    return ArmResult((Confusion.of(predicted, bench.material.test.classes, bench.material.num_classes),))


def _plain_config(bench: ArmMaterial) -> SplitConfig:
    return SplitConfig(
        mode="plaintext",
        insecure=True,
        cut=bench.size.cut,
        clients=len(bench.material.clients),
        wire=WIRE,
        allow_insecure_sim=True,
    )


def _sealed_config(bench: ArmMaterial) -> SplitConfig:
    return SplitConfig(cut=bench.size.cut, clients=len(bench.material.clients), wire=WIRE, allow_insecure_sim=True)


def _split(
    bench: ArmMaterial, config: SplitConfig, front: Front, change: Callable[[StageModule], None] | None = None
) -> ArmResult:
    clients, size = bench.material.clients, bench.size
    scene = SplitScenario(
        bench.source,
        config,
        size.adapter,
        size.optimizer,
        size.rows,
        size.tokens,
        len(clients),
        bench.steps,
        bench.seed,
    )
    simulator = SplitSimulator(scene, bench.task, front=front)
    trainer = simulator.trainer
    if change is not None:
        change(trainer.back)
    dealt = [bench.dealt(indices, client) for client, indices in enumerate(clients)]
    losses = []
    for _ in range(bench.steps):
        step = simulator.step([bench.material.train.pick(next(microbatches)) for microbatches in dealt])
        losses.append(step.loss)
    more = {"losses": losses, "bytes_crossed": simulator.bytes_crossed, "crypto_s": simulator.enclave.crypto_seconds}
    return _finished(bench, trainer, front, bench.steps, losses[-1], more)


def _step(bench: ArmMaterial, trainer: BackTrainer, microbatches: Sequence[Indices]) -> float:
    loss, targets = 0.0, 0
    for indices in microbatches:
        found, count = trainer.learn(*bench.microbatch(indices))
        loss, targets = loss + found, targets + count
    trainer.step()
    return loss / targets


def _finished(
    bench: ArmMaterial,
    trainer: BackTrainer,
    front: Front,
    steps: int,
    loss: float,
    more: Mapping[str, Any] | None = None,
) -> ArmResult:
    digest = weights_digest(trainer.weights())
    return ArmResult((bench.score(trainer.back, front),), steps, loss, digest, more or {})


def _copy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}
