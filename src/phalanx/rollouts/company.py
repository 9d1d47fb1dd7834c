"""The owner's side: it sends weights and requests, has a drawn share read again, and keeps lies out of training."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

from safetensors.torch import save

from phalanx.config import canonical_json
from phalanx.errors import FrameError, PeerLostError, PeerRefusedError, TransportError
from phalanx.rollouts.bundle import RolloutBundle, SignedAnswer, digest_of_answer
from phalanx.rollouts.config import RolloutCheck
from phalanx.rollouts.evidence import EvidenceDirectory
from phalanx.rollouts.examiner import RolloutExaminer
from phalanx.rollouts.generate import check_room, generate_rollouts
from phalanx.rollouts.judgement import RewardRule
from phalanx.rollouts.messages import TO_OWNER, PolicyOffer, PolicyPart, RolloutRefusal, RolloutsEnd
from phalanx.rollouts.policy import PolicyModel, RolloutPolicy
from phalanx.rollouts.request import Prompt, RolloutRequest
from phalanx.rollouts.rollout import Rollout, RolloutAnswer
from phalanx.rollouts.share import CheckedShare
from phalanx.rollouts.standing import SentRequest, WriterAccounts
from phalanx.rollouts.verdict import DismissalCause, RolloutDismissal, RolloutVerdict
from phalanx.transport import CheckedFrame, Endpoint, LinkFault, parse_body

_PART_BYTES = 2**22
_LOOK_EVERY_S = 0.5
_MAX_KEPT = 64
"""Requests of each worker of which a late or a second answer is still looked at."""


class RolloutCompany:
    """Untrusted workers, and the owner that trains on their texts.

    Args:
        check: Share of texts to read again, and tolerances between honest computations.
        share: Draws the texts that are read again.
        reward: Reward of a text; needed where workers report rewards.

    Attributes:
        verdicts: Convictions in the order of their detection.
        dismissals: Workers that were left out and not convicted, in order.
        told: Is told each verdict, with its evidence written, and each dismissal.

    Guarantees:
        A worker is convicted where `judge_bundle` convicts it by the records that are written as evidence, and nowhere
        else.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        workers: Sequence[str],
        check: RolloutCheck,
        share: CheckedShare,
        desk: EvidenceDirectory,
        reward: RewardRule | None = None,
    ) -> None:
        self._endpoint, self._check = endpoint, check
        self._examiner = RolloutExaminer(desk, check, share, reward)
        self._active = list(workers)
        self._accounts = WriterAccounts(check.max_unanswered)
        self._has: dict[str, str] = {}
        self._order = 0
        # by worker and digest: the latest ones of all steps; and those of the step at hand
        self._requests: dict[str, dict[str, SentRequest]] = {name: {} for name in workers}
        self._step: list[SentRequest] = []
        self.verdicts: list[RolloutVerdict] = []
        self.dismissals: list[RolloutDismissal] = []
        self.costs = self._examiner.costs
        self.report_decision: Callable[[RolloutVerdict | RolloutDismissal], None] = lambda decision: None

    @property
    def active_workers(self) -> tuple[str, ...]:
        """Workers that are neither convicted nor left out."""
        return tuple(self._active)

    @property
    def unanswered_requests(self) -> Mapping[str, int]:
        """Requests without a usable answer in time, by worker."""
        return self._accounts.unanswered_requests

    def generate(self, policy: RolloutPolicy, model: PolicyModel, request: RolloutRequest) -> tuple[Rollout, ...]:
        """Have every text of a request written.

        Prompts are shared out among the workers. What a worker does not answer, or lies about, is asked of the others;
        where no worker is left, the owner writes it itself.

        Args:
            policy: The weights that the request names.
            model: The same, to read with.

        Returns:
            In the order of `RolloutRequest.text_places`. None is of a worker that was convicted of a lie in this step.

        Raises:
            DataError: A prompt does not fit into the model.
            FrameError: The prompts of one worker are too long for one request.
        """
        check_room(model, request)
        self._examiner.keep_weights(policy, model.device_name)
        for sent in self._step:
            sent.shrink_answer()
        self._step = []
        passed_over: set[str] = set()
        missing = request.prompts
        while missing:
            workers = [name for name in self._active if name not in passed_over]
            if not workers:
                break
            asked = self._ask_workers(policy, request, missing, workers)
            for sent in asked:
                self._settle_answer(sent, policy, model)
            passed_over |= {sent.worker for sent in asked if not sent.texts}
            done = {text.prompt for text in self._step_texts()}
            missing = tuple(prompt for prompt in request.prompts if prompt.number not in done)
        texts = self._step_texts()
        if missing:
            texts += generate_rollouts(model, request.model_copy(update={"prompts": missing}))
        by_place = {(text.prompt, text.sample): text for text in texts}
        self.costs.texts += len(by_place)
        self.costs.tokens += sum(len(text.ids) for text in by_place.values())
        return tuple(by_place[place] for place in request.text_places)

    def dismiss_revoked(self, reasons: Mapping[str, str], step: int) -> None:
        """Leave workers out whose certificate the owner has revoked, by name with the owner's reason."""
        for name in self.active_workers:
            if name in reasons:
                self._dismiss_worker(name, step, "revoked", f"its certificate was revoked: {reasons[name]}")

    def close(self) -> None:
        """Look at the messages that have come since, and tell the workers that no further request comes."""
        while (item := self._endpoint.receive_item(0.0)) is not None:
            if isinstance(item, CheckedFrame):
                self._take_frame(item)
        for name in self._active:
            # a worker that is gone need not be told
            with contextlib.suppress(TransportError):
                self._endpoint.send_frame(name, RolloutsEnd.kind, {})

    def _step_texts(self) -> tuple[Rollout, ...]:
        """Return the workers' texts of this step, without the texts of convicted workers."""
        return tuple(text for sent in self._step for text in sent.texts)

    def _ask_workers(
        self, policy: RolloutPolicy, request: RolloutRequest, prompts: Sequence[Prompt], workers: Sequence[str]
    ) -> list[SentRequest]:
        asked: list[SentRequest] = []
        for n, name in enumerate(workers):
            changes = {"prompts": tuple(prompts[n :: len(workers)]), "order": self._order}
            part = request.model_copy(update={**changes, "tolerance": self._check.tolerance})
            if not part.prompts:
                continue
            try:
                self._send_policy(name, policy)
                header = self._endpoint.send_frame(name, part.kind, part.model_dump(mode="json"))
            except (PeerLostError, PeerRefusedError) as exc:
                self._dismiss_worker(name, part.step, "lost", str(exc))
                continue
            self._order += 1
            self._accounts.count_request(name)
            sent = SentRequest(name, part, header)
            asked.append(sent)
            self._step.append(sent)
            requests = self._requests[name]
            requests[part.request_digest] = sent
            while len(requests) > _MAX_KEPT:
                requests.pop(next(iter(requests)))
        self._await_answers(asked, request.step)
        return asked

    def _await_answers(self, asked: Sequence[SentRequest], step: int) -> None:
        """Receive messages until every worker has answered its request, is left out, or the time is over."""
        deadline = time.monotonic() + self._check.answer_timeout_s
        while any(not sent.is_settled and sent.worker in self._active for sent in asked):
            left_s = max(0.0, deadline - time.monotonic())
            item = self._endpoint.receive_item(min(_LOOK_EVERY_S, left_s))
            if isinstance(item, LinkFault):
                self._dismiss_worker(item.peer, step, "lost", str(item.error))
            elif item is not None:
                self._take_frame(item)
            elif not left_s:
                return

    def _take_frame(self, item: CheckedFrame) -> None:
        """Keep one frame of a worker under the request that it names; what names none of this worker's is ignored."""
        name = item.sender
        if name not in self._active:
            return
        step = max((sent.request.step for sent in self._step), default=0)
        excess = self._accounts.count_frame(name)
        if excess is not None:
            self._dismiss_worker(name, step, "frames", excess)
            return
        try:
            body = parse_body(TO_OWNER, item.kind, item.body)
        except FrameError as exc:
            # of another release, or worse: nothing of it can be used
            self._dismiss_worker(name, step, "frames", f"sent a malformed frame: {exc}")
            return
        if isinstance(body, RolloutRefusal):
            sent = self._requests[name].get(body.request)
            if sent is not None:
                sent.refusal = body.reason
        elif isinstance(body, RolloutAnswer):
            sent = self._requests[name].get(body.request)
            if sent is not None:
                self._take_answer(sent, item)

    def _take_answer(self, sent: SentRequest, item: CheckedFrame) -> None:
        if sent.answer is None:
            sent.answer = SignedAnswer(item.header, bytes(item.payload) if sent.is_open else b"")
        elif digest_of_answer(sent.answer.header) != digest_of_answer(item.header):
            bundle = RolloutBundle(sent.worker, sent.header, sent.answer, second_answer=item.header)
            verdict = self._examiner.judge_records(bundle).verdict
            if verdict is not None:
                self._convict_worker(verdict)

    def _settle_answer(self, sent: SentRequest, policy: RolloutPolicy, model: PolicyModel) -> None:
        """Judge a worker's signed answer; there are no texts of a worker that is convicted, in doubt, or silent."""
        sent.is_open = False
        name = sent.worker
        if name not in self._active:
            return
        if sent.answer is None:
            self._count_unanswered(sent, sent.refusal or "it was silent")
            return
        texts, verdict, dismissal, doubt = self._examiner.examine_answer(
            sent, policy, model, tuple(self._requests[name].values())
        )
        if verdict is not None:
            self._convict_worker(verdict)
        elif dismissal is not None:
            self._dismiss_worker(name, dismissal.step, dismissal.cause, dismissal.reason)
        elif doubt is not None:
            self._count_unanswered(sent, doubt)
        else:
            sent.texts = texts
            self._accounts.count_answer(name)

    def _count_unanswered(self, sent: SentRequest, reason: str) -> None:
        excess = self._accounts.count_unanswered(sent.worker, reason)
        if excess is not None:
            self._dismiss_worker(sent.worker, sent.request.step, "undecided" if sent.answer else "unanswered", excess)

    def _convict_worker(self, verdict: RolloutVerdict) -> None:
        self.verdicts.append(verdict)
        self._drop_worker(verdict.party)
        self.report_decision(verdict)

    def _dismiss_worker(self, name: str, step: int, cause: DismissalCause, reason: str) -> None:
        """Leave a worker out, without a conviction."""
        if name not in self._active:
            return
        dismissal = RolloutDismissal(party=name, step=step, cause=cause, reason=reason)
        self.dismissals.append(dismissal)
        self._drop_worker(name)
        self.report_decision(dismissal)

    def _drop_worker(self, name: str) -> None:
        """Ignore a worker from now on, and use none of its texts of this step."""
        self._active.remove(name)
        self._endpoint.evict_party(name)
        self._requests[name].clear()
        for sent in self._step:
            if sent.worker == name:
                sent.texts = ()

    def _send_policy(self, name: str, policy: RolloutPolicy) -> None:
        if self._has.get(name) == policy.full_digest:
            return
        file = save({key: tensor.detach().cpu().contiguous().clone() for key, tensor in policy.tensors.items()})
        config = canonical_json(dict(policy.config)).decode()
        offer = PolicyOffer(policy=policy.full_digest, config=config, size_bytes=len(file))
        self._endpoint.send_frame(name, offer.kind, offer.model_dump(mode="json"))
        for offset in range(0, len(file), _PART_BYTES):
            part = PolicyPart(policy=policy.full_digest, offset=offset)
            self._endpoint.send_frame(
                name, part.kind, part.model_dump(mode="json"), [file[offset : offset + _PART_BYTES]]
            )
        self._has[name] = policy.full_digest
