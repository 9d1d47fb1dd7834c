"""Client and enclave in one process, with the same frames, evidence and keys as between processes.

A simulator: nothing keeps the parts from each other's memory. Between them stands a host, which a test, a bench or an
attack may write: it sees every frame and decides what arrives.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, TypeVar

from torch import Tensor

from phalanx.engine import NO_EXTRAS
from phalanx.errors import FailedBatchError, FrameError, SealError
from phalanx.models import AdapterConfig, Attention, LoraConfig, ModelSource
from phalanx.optimizers import OptimizerConfig
from phalanx.security.crypto import Identity
from phalanx.security.seal import ReleaseGate
from phalanx.security.tee import Attester, SimAttester
from phalanx.split.channel.client_order import client_of, microbatches_of
from phalanx.split.channel.link import REFUSALS, FrameLink, PlainLink
from phalanx.split.channel.resend_window import TRIES
from phalanx.split.channel.tensor_kinds import What
from phalanx.split.config import ENCLAVE, SplitConfig
from phalanx.split.handshake.meeting import ClientHandshake, EnclaveHandshake
from phalanx.split.handshake.terms import HandshakeTerms, attested_keys
from phalanx.split.hardware.measure import measure_code, policy_of
from phalanx.split.roles.client import Feedback, PackedMicrobatch, SplitClient
from phalanx.split.roles.enclave import Enclave, Replies
from phalanx.split.training.classification import HeldOutScores
from phalanx.split.training.parts import FewBits, Front, FrontPart, build_back
from phalanx.split.training.task import NextToken, SplitTask, kinds_of_task
from phalanx.split.training.trainer import BackTrainer

_Taken = TypeVar("_Taken")


class _Kernel(TypedDict):
    attention: Attention
    document_attention: bool


_RUN = "simulated-run"
_CONFIG_DIGEST = b"\x5e" * 32


@dataclass(frozen=True)
class FrameInTransit:
    """One frame on its way.

    Attributes:
        name: Tensor name, such as ``cut.train``; any host can read it in the frame's header.
        attempt: Its number, from 0; higher after refusals.
    """

    client: str
    to_enclave: bool
    name: str
    step: int
    microbatch: int
    attempt: int
    frame: bytes


Host = Callable[[FrameInTransit], Iterable[bytes]]
"""Decides what arrives in the place of a frame: the frame, others, several, or none."""


def honest_host(crossing: FrameInTransit) -> Iterable[bytes]:
    """Pass a frame on as it is."""
    return (crossing.frame,)


@dataclass(frozen=True)
class SimulatedStep:
    """The clients' joint knowledge of a step.

    Attributes:
        norm: Gradient norm over all parameters, before clipping.
        bytes_crossed: Bytes of all frames, both ways.
    """

    loss: float
    num_targets: int
    norm: float
    bytes_crossed: int


class MemoryEpochs:
    """Epochs of a simulation: they last as long as it does."""

    def __init__(self) -> None:
        self._epoch = 0

    def raise_epoch(self) -> int:
        """As `EpochSource` says."""
        self._epoch += 1
        return self._epoch


@dataclass(frozen=True)
class SplitScenario:
    """The parameters of a simulation.

    Attributes:
        microbatches: Microbatches of a step; clients take turns.
        total_steps: Steps of the learning-rate schedule.
        seed: Seed of the adapters' first values and of dropout.
        document_attention: Whether attention stays inside documents.
        precision: Matrix products of both parts.
    """

    source: ModelSource
    split: SplitConfig
    adapter: AdapterConfig
    optimizer: OptimizerConfig
    rows: int
    seq: int
    microbatches: int
    total_steps: int
    seed: int = 0
    attention: Attention = "sdpa"
    document_attention: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"


class SplitSimulator:
    """A whole split run without processes.

    Args:
        task: Task of the back part; next-token prediction when left out.
        host: Carries the frames; honest when left out. May be exchanged between steps.
        attester: Makes the enclave's evidence; of the simulated tier when left out.
        front: Front part of all clients; when left out, the scenario cuts it from the model.

    Attributes:
        bytes_crossed: Bytes of all frames so far.

    Raises:
        RefusedEvidenceError: The clients do not accept the enclave's evidence.
    """

    def __init__(
        self,
        scene: SplitScenario,
        task: SplitTask | None = None,
        host: Host = honest_host,
        attester: Attester | None = None,
        front: Front | None = None,
    ) -> None:
        split, task = scene.split, task or NextToken()
        self.host, self.bytes_crossed = host, 0
        self._scenario, self._attester = scene, attester
        kernel: _Kernel = {"attention": scene.attention, "document_attention": scene.document_attention}
        self.front: Front = front or FrontPart(
            scene.source,
            split.cut,
            wire=split.wire,
            few_bits=FewBits(
                scene.precision, scene.adapter.quantize if isinstance(scene.adapter, LoraConfig) else None
            ),
            **kernel,
        )
        back = build_back(scene.source, split.cut, adapter=scene.adapter, seed=scene.seed, **kernel)
        trainer = self.trainer = BackTrainer(
            back, task, scene.optimizer, scene.total_steps, scene.seed, precision=scene.precision
        )
        width = scene.source.hidden_size + scene.document_attention
        self._kinds = kinds_of_task(task, scene.rows, scene.seq, width, split.wire)
        gate = None if split.release is None else ReleaseGate(split.release)
        self.enclave = Enclave(trainer, self._kinds, scene.microbatches, split.client_names, gate)
        self._identities = {name: Identity.without_certificate(name) for name in (ENCLAVE, *split.client_names)}
        self._epochs = {name: MemoryEpochs() for name in self._identities}
        self.clients: dict[str, SplitClient] = {}
        self.meet_clients()

    def meet_clients(self) -> None:
        """Have every client appraise the enclave and agree on fresh keys with it, as after a restart."""
        for name in self._scenario.split.client_names:
            near, far = (PlainLink(), PlainLink()) if self._is_plain else self._shake_hands(name)
            self.clients[name] = SplitClient(name, self.front, self._kinds, near)
            self.enclave.connect_client(name, far)

    def step(
        self, batch: Sequence[tuple[Tensor, Tensor]], extras: Sequence[Mapping[str, Tensor]] = ()
    ) -> SimulatedStep:
        """Train one step on ids and labels of each microbatch, and on its extra rows where there are any.

        Raises:
            SealError: The host never let the due frame through; nothing of the step has been applied.
            FailedBatchError: The loss or the gradient is not finite; nothing was applied.
        """
        names, step, before = self._scenario.split.client_names, self.enclave.trainer.num_steps, self.bytes_crossed
        replies: Replies = {}
        for number, (ids, labels) in enumerate(batch):
            client = self.clients[client_of(number, names)]
            named = extras[number] if extras else NO_EXTRAS
            replies = self._send_packed(client, client.pack_microbatch("train", step, number, ids, labels, named))
        feedback: dict[int, tuple[float, int]] = {}
        norm = 0.0
        for name, frame in replies.items():
            mine = microbatches_of(name, self._scenario.microbatches, names)
            client_feedback = self._receive_feedback(name, frame, "train", step, mine)
            norm = client_feedback.norm
            feedback.update(zip(mine, client_feedback.losses, strict=True))
        losses = [feedback[number] for number in sorted(feedback)]
        targets = sum(count for _, count in losses)
        if not norm >= 0:
            raise FailedBatchError(f"step {step}: the enclave computed a loss or gradient that is not finite")
        loss = sum(loss for loss, _ in losses) / targets
        return SimulatedStep(loss, targets, norm, self.bytes_crossed - before)

    def measure_held_out(
        self, ids: Tensor, labels: Tensor, client: str | None = None, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> HeldOutScores:
        """Return what held-out rows come to, sent by one client; the first when left out."""
        sender = self.clients[client or self._scenario.split.client_names[0]]
        step = self.enclave.trainer.num_steps
        replies = self._send_packed(sender, sender.pack_microbatch("held_out", step, 0, ids, labels, extras))
        crossing = FrameInTransit(sender.name, False, "result.held_out", step, 0, 0, bytes(replies[sender.name]))
        return self._carry_frame(crossing, lambda raw: sender.read_scores(raw, step, 0, ids.shape[0]))

    def copy_adapters(self) -> dict[str, Tensor]:
        """Return copies of the trained tensors, by name; only a simulator gives access to them."""
        return {name: tensor.clone() for name, tensor in self.enclave.trainer.trained_weights()}

    @property
    def _is_plain(self) -> bool:
        return self._scenario.split.mode == "plaintext"

    def _send_packed(self, client: SplitClient, packed: PackedMicrobatch) -> Replies:
        replies: Replies = {}
        for kind, frame in zip(self._kinds.microbatch_kinds(packed.what, packed.rows), packed.frames, strict=True):
            replies = self._carry_frame(
                FrameInTransit(client.name, True, kind.name, packed.step, packed.microbatch, 0, bytes(frame)),
                lambda raw: self.enclave.take_frame(client.name, packed.what, packed.microbatch, packed.rows, raw),
            )
        return replies

    def _receive_feedback(self, name: str, frame: bytearray, what: What, step: int, mine: Sequence[int]) -> Feedback:
        crossing = FrameInTransit(name, False, f"result.{what}", step, mine[-1], 0, bytes(frame))
        return self._carry_frame(
            crossing, lambda raw: self.clients[name].read_feedback(raw, what, step, mine[-1], len(mine))
        )

    def _carry_frame(self, crossing: FrameInTransit, take: Callable[[bytes], _Taken]) -> _Taken:
        """Let the host handle a frame, repeatedly, until the receiver takes the result."""
        refusal: SealError | FrameError = FrameError(f"{crossing.client}: {crossing.name} never arrived")
        for attempt in range(TRIES):
            self.bytes_crossed += len(crossing.frame)
            for raw in self.host(replace(crossing, attempt=attempt)):
                try:
                    return take(raw)
                except REFUSALS as exc:
                    refusal = exc
        raise refusal

    def _shake_hands(self, name: str) -> tuple[FrameLink, FrameLink]:
        split, inside, outside = self._scenario.split, self._identities[ENCLAVE], self._identities[name]
        keys = attested_keys(inside.public)
        terms_of_run = HandshakeTerms(_RUN, _CONFIG_DIGEST, inside.public, keys, split.chunk_bytes)
        attester = self._attester or SimAttester(inside, measure_code())
        clients = {name: self._identities[name].public for name in split.client_names}
        theirs = EnclaveHandshake(inside, attester, terms_of_run, self._epochs[ENCLAVE], clients)
        ours = ClientHandshake(outside, terms_of_run, self._epochs[name], lambda: policy_of(split))
        ours.appraise_enclave(theirs.enclave_evidence(name, ours.draw_nonce()))
        reply, far = theirs.admit_client(name, *ours.make_hello())
        return ours.accept_reply(reply), far
