"""The arms of the comparison: which party trains on which texts, and what crosses; one function and one line each."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from phalanx.data.tasks import Example, tfidf_predictions
from phalanx.lab.reproduce.medical import federated
from phalanx.lab.reproduce.medical.bench import ArmMaterial, ArmResult, copy_state
from phalanx.lab.reproduce.medical.front import NoisyFront
from phalanx.lab.reproduce.medical.size import NOISE
from phalanx.models import StageModule
from phalanx.objectives import ConfusionMatrix
from phalanx.split import Front, SplitConfig
from phalanx.split.masked import MaskedConfig, MaskingClient, SimulatedWorker, mask_linears, process_pads
from phalanx.testing import SplitScenario, SplitSimulator

WIRE: Literal["bf16"] = "bf16"
"""The precision in which hidden states leave a client; what never leaves stays float32."""


Arm = Callable[[ArmMaterial], ArmResult]


def run_tfidf(bench: ArmMaterial) -> ArmResult:
    """TF-IDF and logistic regression on whole texts: no model at all."""
    return _fit_tfidf(bench, bench.material.train_examples, bench.material.test_examples)


def tfidf_cut(bench: ArmMaterial) -> ArmResult:
    """The same on as much of each text as the model is shown."""
    return _fit_tfidf(bench, bench.material.train_cut, bench.material.test_cut)


def run_centralised(bench: ArmMaterial) -> ArmResult:
    """Train with all texts in one place: as many rows a step as the split takes from all clients together."""
    trainer = bench.make_trainer()
    (everything,) = bench.material.all_at_once
    dealt = bench.deal_microbatches(everything, 0)
    loss = 0.0
    for _ in range(bench.arm_steps):
        loss = bench.learn_step(trainer, [next(dealt) for _ in bench.material.clients])
    return bench.make_result(trainer, bench.front, bench.arm_steps, loss)


def run_local(bench: ArmMaterial) -> ArmResult:
    """Every client trains alone on its own texts, in as many passes; all are tested on the common test texts."""
    trainer = bench.make_trainer()
    first = copy_state(trainer.state_tensors())
    scores = []
    for client, indices in enumerate(bench.material.clients):
        trainer.load_state(first, 0)
        dealt = bench.deal_microbatches(indices, client)
        for _ in range(max(1, bench.size.epochs * len(indices) // bench.size.rows)):
            bench.learn_step(trainer, [next(dealt)])
        scores.append(bench.score_back(trainer.back, bench.front))
    return ArmResult(tuple(scores), more={"client_accuracy": [score.accuracy for score in scores]})


def split_plain(bench: ArmMaterial) -> ArmResult:
    """The split engine with frames that the host can read."""
    return _run_split(bench, _plain_config(bench), bench.front.with_wire(WIRE))


def split_noised(bench: ArmMaterial) -> ArmResult:
    """Train the plain split with clients that clip and noise what leaves them: the guard without an enclave.

    The test texts are noised as well, for every client that asks the model sends its text in the same way.
    """
    front = NoisyFront(bench.front, bench.clip, NOISE, bench.seed, WIRE)
    return _run_split(bench, _plain_config(bench), front)


def split_sealed(bench: ArmMaterial) -> ArmResult:
    """The split engine with attestation (of the simulated tier), key agreement and sealed frames."""
    return _run_split(bench, _sealed_config(bench), bench.front.with_wire(WIRE))


def split_masked(bench: ArmMaterial) -> ArmResult:
    """Train the sealed split with an enclave that leaves its frozen linear layers, masked, to an untrusted worker."""

    def mask(back: StageModule) -> None:
        config = MaskedConfig(rows=bench.size.rows * bench.size.tokens)
        mask_linears(back, MaskingClient(SimulatedWorker(), process_pads("reproduce-medical"), config))

    return _run_split(bench, _sealed_config(bench), bench.front.with_wire(WIRE), mask)


ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        "tfidf": run_tfidf,
        "tfidf_cut": tfidf_cut,
        "centralised": run_centralised,
        "local": run_local,
        "fedavg": federated.fedavg_plain,
        "fedavg_secure": federated.fedavg_secure,
        "fedavg_private": federated.fedavg_private,
        "fedavg_attacked": federated.fedavg_attacked,
        "fedavg_robust": federated.fedavg_robust,
        "split_plain": split_plain,
        "split_sealed": split_sealed,
        "split_noised": split_noised,
        "split_masked": split_masked,
    }
)
"""In the order in which they are shown."""


def _fit_tfidf(bench: ArmMaterial, train: Sequence[Example], test: Sequence[Example]) -> ArmResult:
    predicted = tfidf_predictions(train, test, bench.seed)
    return ArmResult(
        (ConfusionMatrix.count_answers(predicted, bench.material.test.classes, bench.material.num_classes),)
    )


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


def _run_split(
    bench: ArmMaterial, config: SplitConfig, front: Front, change: Callable[[StageModule], None] | None = None
) -> ArmResult:
    clients, size = bench.material.clients, bench.size
    scene = SplitScenario(
        bench.source,
        config,
        size.adapter_config,
        size.optimizer_config,
        size.rows,
        size.tokens,
        len(clients),
        bench.arm_steps,
        bench.seed,
    )
    simulator = SplitSimulator(scene, bench.classification_task, front=front)
    trainer = simulator.trainer
    if change is not None:
        change(trainer.back)
    dealt = [bench.deal_microbatches(indices, client) for client, indices in enumerate(clients)]
    losses = []
    for _ in range(bench.arm_steps):
        step = simulator.step([bench.material.train.pick_rows(next(microbatches)) for microbatches in dealt])
        losses.append(step.loss)
    more = {"losses": losses, "bytes_crossed": simulator.bytes_crossed, "crypto_s": simulator.enclave.crypto_seconds}
    return bench.make_result(trainer, front, bench.arm_steps, losses[-1], more)
