"""The worker's side: it takes weights, checks their digest, and answers requests in the order in which they come."""

import json
from collections.abc import Callable, Sequence

from safetensors.torch import load

from phalanx.config import printable_text
from phalanx.errors import DataError, FrameError, ModelError
from phalanx.pipeline import settle_numerics
from phalanx.rollouts.config import BATCH_ROWS, AttentionKernel, RolloutWorkerConfig
from phalanx.rollouts.generate import generate_rollouts
from phalanx.rollouts.messages import TO_WORKER, PolicyOffer, PolicyPart, RolloutRefusal, RolloutsEnd
from phalanx.rollouts.policy import PolicyModel, RolloutPolicy
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import RolloutAnswer, WritingClass, pack_answer
from phalanx.rollouts.verdict import RolloutTolerance
from phalanx.transport import CheckedFrame, Endpoint, OwnerLink, join_owner, parse_body
from phalanx.transport.tensors import UNREADABLE

Answer = tuple[RolloutAnswer, bytes]


class RolloutWriter:
    """The computing part of a worker: weights in, answers out.

    Args:
        batch_rows: About so many texts at a time.
        tolerance: The narrowest by which answers may be judged; None for the default.
    """

    def __init__(
        self,
        attention: AttentionKernel = "sdpa",
        device: str = "cpu",
        batch_rows: int = BATCH_ROWS,
        tolerance: RolloutTolerance | None = None,
    ) -> None:
        self._tolerance = tolerance or RolloutTolerance()
        self._class, self._device = WritingClass(attention=attention, batch_rows=batch_rows), device
        self._model: PolicyModel | None = None
        self._policy = ""

    def use_policy(self, policy: RolloutPolicy) -> None:
        """Have the next answers written by these weights."""
        if self._model is None:
            self._model = PolicyModel.from_policy(policy, self._class.attention, self._device)
        else:
            self._model.copy_weights(policy)
        self._policy = policy.full_digest

    def write_answers(self, request: RolloutRequest) -> Sequence[Answer]:
        """Answer a request, with one answer.

        Raises:
            DataError: A prompt does not fit, the weights of the request are not loaded, or its tolerance is narrower
                than this worker allows.
        """
        if self._model is None or self._policy != request.policy:
            raise DataError(f"policy {request.policy[:16]} was not sent; {self._policy[:16] or 'none'} is here")
        narrower = request.tolerance.narrower_parts(self._tolerance)
        if narrower:
            raise DataError(
                f"tolerance: {', '.join(narrower)} would be judged more narrowly than this worker's file allows"
            )
        texts = generate_rollouts(self._model, request, self._class.batch_rows)
        return [pack_answer(request, texts, self._class)]


class RolloutService:
    """A loop that answers one owner's frames.

    Args:
        owner: Party name; no other party is answered.
        writer: Computes; another than the honest one is for drills only.
        report: Receives a line about each request that is answered.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        owner: str,
        writer: RolloutWriter,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._endpoint, self._owner, self._writer, self._report = endpoint, owner, writer, report
        self._offer: PolicyOffer | None = None
        self._file = bytearray()
        self._order = -1

    def serve_link(self, link: OwnerLink) -> None:
        """Serve until told to end."""
        for item in link.receive_frames():
            if not self.handle_frame(item):
                return

    def handle_frame(self, item: CheckedFrame) -> bool:
        """Handle one frame; False where it was the last one."""
        if item.sender != self._owner:
            return True
        body = parse_body(TO_WORKER, item.kind, item.body)
        match body:
            case RolloutsEnd():
                return False
            case PolicyOffer():
                self._offer, self._file = body, bytearray()
            case PolicyPart():
                self._take_part(body, item.payload)
            case RolloutRequest():
                self._answer_request(body)
        return True

    def _take_part(self, part: PolicyPart, payload: memoryview) -> None:
        offer = self._offer
        if offer is None or part.policy != offer.policy or part.offset != len(self._file):
            raise FrameError("a part of a policy came out of order")
        if len(self._file) + payload.nbytes > offer.size_bytes:
            raise FrameError(f"a policy of {offer.size_bytes} bytes has more than was announced")
        self._file += payload
        if len(self._file) == offer.size_bytes:
            self._writer.use_policy(_checked_policy(offer, self._file))
            self._offer, self._file = None, bytearray()

    def _answer_request(self, request: RolloutRequest) -> None:
        if request.order <= self._order:
            # two answers to one request, which may differ in their last bits, would convict this worker
            raise FrameError(f"request {request.order} came after request {self._order}")
        self._order = request.order
        try:
            answers = self._writer.write_answers(request)
        except (DataError, ModelError) as exc:
            refusal = RolloutRefusal(request=request.request_digest, reason=str(exc)[:500])
            self._endpoint.send_frame(self._owner, refusal.kind, refusal.model_dump(mode="json"))
            self._report(f"step {request.step}: refused: {printable_text(refusal.reason)}")
            return
        for answer, payload in answers:
            self._endpoint.send_frame(self._owner, answer.kind, answer.model_dump(mode="json"), [payload])
        self._report(f"step {request.step}: wrote {len(request.text_places)} texts")


def _checked_policy(offer: PolicyOffer, file: bytearray) -> RolloutPolicy:
    try:
        policy = RolloutPolicy(json.loads(offer.config), load(bytes(file)))
    except UNREADABLE as exc:
        raise FrameError(f"a policy is malformed: {exc}") from exc
    if policy.full_digest != offer.policy:
        raise ModelError(f"the weights that came are {policy.full_digest[:16]}, the owner names {offer.policy[:16]}")
    return policy


def run_rollout_worker(
    config: RolloutWorkerConfig,
    writer: RolloutWriter | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Serve until the owner ends the run or is gone.

    Args:
        config: This worker's identity, and where the owner listens.
        writer: Computes; another than the honest one is for drills only.
        report: Receives a line about each request that is answered.

    Raises:
        PeerLostError: The owner is gone, or was not there in time.
    """
    settle_numerics(config.threads)
    with join_owner(config) as link:
        service_writer = writer or RolloutWriter(config.attention, config.device, config.batch_rows, config.tolerance)
        report(f"joined {config.owner}; waiting for weights and requests")
        RolloutService(link.endpoint, config.owner_name, service_writer, report).serve_link(link)
        link.endpoint.flush_frames(config.transport.timeout_s)
