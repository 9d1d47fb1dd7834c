"""The owner's side: it sends weights and requests, has a drawn share read again, and keeps lies out of training."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from safetensors.torch import save

from phalanx.config import canonical_json
from phalanx.errors import FrameError, PeerLostError, PeerRefusedError, TransportError
from phalanx.rollouts.config import RolloutCheck
from phalanx.rollouts.evidence import EvidenceDesk, RolloutCase, SignedAnswer, digest_of_answer, write_rollout_evidence
from phalanx.rollouts.generate import check_room, generate_rollouts
from phalanx.rollouts.judgement import (
    BorderBook,
    RewardRule,
    judge_age,
    judge_reward,
    judge_rollout,
    judge_second_answer,
    read_answer,
)
from phalanx.rollouts.messages import TO_OWNER, PolicyOffer, PolicyPart, RolloutRefusal, RolloutsEnd
from phalanx.rollouts.policy import PolicyModel, RolloutPolicy
from phalanx.rollouts.prefill import RereadRollout, reread_rollouts
from phalanx.rollouts.request import Prompt, RolloutRequest
from phalanx.rollouts.rollout import Rollout, RolloutAnswer
from phalanx.rollouts.share import CheckedShare
from phalanx.rollouts.verdict import RolloutVerdict
from phalanx.transport import CheckedFrame, Endpoint, LinkFault, SignedHeader, parse_body

_PART_BYTES = 2**22
_LOOK_EVERY_S = 0.5
_MOST_KEPT = 256
"""Requests of which a second answer is still looked at."""


@dataclass
class RolloutCosts:
    """What a company has done so far.

    Attributes:
        texts: That were handed out for training.
        tokens: In them.
        checked_texts: That were read again.
        checked_tokens: In them.
        check_s: CPU seconds of this process's thread for it.
    """

    texts: int = 0
    tokens: int = 0
    checked_texts: int = 0
    checked_tokens: int = 0
    check_s: float = 0.0


@dataclass
class KeptPolicies:
    """The last two policies, as models to read with: a worker may still be using the one before.

    Attributes:
        now: The policy that was kept last, and its digest.
        before: The one before that; None until there were two.
    """

    now: tuple[str, PolicyModel] | None = None
    before: tuple[str, PolicyModel] | None = None

    def keep(self, policy: RolloutPolicy, device: str) -> None:
        """Keep a copy of these weights beside those before."""
        if self.now is not None and self.now[0] == policy.digest:
            return
        if self.before is None:
            model = PolicyModel.build(policy, device=device)
        else:
            model = self.before[1]
            model.take(policy)
        self.now, self.before = (policy.digest, model), self.now


@dataclass
class _Sent:
    """A request to one worker, and what was signed about it."""

    request: RolloutRequest
    header: SignedHeader
    answers: list[SignedAnswer] = field(default_factory=list)
    texts: tuple[Rollout, ...] = ()


class RolloutCompany:
    """Workers that are not trusted, and the owner that trains on what they write.

    Args:
        endpoint: The owner's; the workers are its peers.
        workers: Names of those that take part.
        check: What is read again, and how far honest computations may be apart.
        share: Draws what is read again.
        desk: Where evidence goes.
        reward: What a text earns; needed where workers report rewards.

    Attributes:
        verdicts: In the order in which workers were convicted.
        costs: Of the checks.
        told: Is told each verdict, with its evidence written.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        workers: Sequence[str],
        check: RolloutCheck,
        share: CheckedShare,
        desk: EvidenceDesk,
        reward: RewardRule | None = None,
    ) -> None:
        self._endpoint, self._check, self._share, self._desk, self._reward = endpoint, check, share, desk, reward
        self._active = list(workers)
        self._borders = BorderBook(check.tolerance.border_rate)
        self._kept = KeptPolicies()
        self._has: dict[str, str] = {}
        # the requests of the step at hand, and the latest ones of all steps, by worker and digest
        self._sent: dict[tuple[str, str], _Sent] = {}
        self._latest: dict[tuple[str, str], _Sent] = {}
        self.verdicts: list[RolloutVerdict] = []
        self.costs = RolloutCosts()
        self.told: Callable[[RolloutVerdict], None] = lambda verdict: None

    @property
    def active(self) -> tuple[str, ...]:
        """Workers that are neither convicted nor gone."""
        return tuple(self._active)

    def generate(self, policy: RolloutPolicy, model: PolicyModel, request: RolloutRequest) -> tuple[Rollout, ...]:
        """Have every text of a request written.

        Prompts are shared out among the workers. What a worker does not answer, or lies about, is asked of the others;
        where no worker is left, the owner writes it itself.

        Args:
            policy: The weights that the request names.
            model: The same, to read with.
            request: Prompts, rule and seed.

        Returns:
            In the order of `RolloutRequest.places`. None is of a worker that was convicted of a lie in this step.

        Raises:
            DataError: A prompt does not fit into the model.
            ModelError: The weights give a logit that is no finite number.
            FrameError: The prompts of one worker are too long for one request.
        """
        check_room(model, request)
        if self._check.rate > 0.0:
            self._kept.keep(policy, model.device)
        self._sent.clear()
        passed_over: set[str] = set()
        missing = request.prompts
        while missing:
            workers = [name for name in self._active if name not in passed_over]
            if not workers:
                break
            asked = self._ask(policy, request, missing, workers)
            for name, sent in asked.items():
                self._settle(name, sent, policy, model)
            passed_over |= {name for name, sent in asked.items() if not sent.texts}
            done = {one.prompt for one in self._texts()}
            missing = tuple(one for one in request.prompts if one.number not in done)
        texts = self._texts()
        if missing:
            texts += generate_rollouts(model, request.model_copy(update={"prompts": missing}))
        by_place = {(one.prompt, one.sample): one for one in texts}
        self.costs.texts += len(by_place)
        self.costs.tokens += sum(len(one.ids) for one in by_place.values())
        return tuple(by_place[place] for place in request.places)

    def close(self) -> None:
        """Tell the workers that no further request comes."""
        for name in self._active:
            # a worker that is gone need not be told
            with contextlib.suppress(TransportError):
                self._endpoint.send(name, RolloutsEnd.kind, {})

    def _texts(self) -> tuple[Rollout, ...]:
        """What workers wrote in this step, but for those that were convicted."""
        return tuple(one for sent in self._sent.values() for one in sent.texts)

    def _ask(
        self, policy: RolloutPolicy, request: RolloutRequest, prompts: Sequence[Prompt], workers: Sequence[str]
    ) -> dict[str, _Sent]:
        """Share prompts out, and wait for answers; a worker without one has no texts."""
        asked: dict[str, _Sent] = {}
        for n, name in enumerate(workers):
            part = request.model_copy(update={"prompts": tuple(prompts[n :: len(workers)])})
            if not part.prompts:
                continue
            try:
                self._send_policy(name, policy)
                header = self._endpoint.send(name, part.kind, part.model_dump(mode="json"))
            except (PeerLostError, PeerRefusedError):
                self._drop(name)
                continue
            asked[name] = self._sent[name, part.digest] = _Sent(part, header)
            self._latest[name, part.digest] = asked[name]
        while len(self._latest) > _MOST_KEPT:
            self._latest.pop(next(iter(self._latest)))
        waiting, deadline = set(asked), time.monotonic() + self._check.answer_timeout_s
        while waiting and time.monotonic() < deadline:
            item = self._endpoint.receive(_LOOK_EVERY_S)
            if isinstance(item, LinkFault):
                self._drop(item.peer)
            elif item is not None and self._take(item):
                waiting.discard(item.sender)
            waiting &= set(self._active)
        return asked

    def _take(self, item: CheckedFrame) -> bool:
        """Keep one frame of a worker; whether it has now said all about the request that is under way."""
        name = item.sender
        try:
            body = parse_body(TO_OWNER, item.kind, item.body)
        except FrameError:
            # of another release, or worse: nothing of it can be used
            self._drop(name)
            return True
        if isinstance(body, RolloutRefusal):
            return (name, body.request) in self._sent
        if not isinstance(body, RolloutAnswer):
            return False
        under_way = [key for key in self._sent if key[0] == name]
        key = (name, body.request)
        if key not in self._latest and under_way:
            # what it was asked for last is what it has to answer for
            key = under_way[-1]
        sent = self._latest.get(key)
        if sent is None:
            return False
        # one that differs from the first says all that more could
        if len(sent.answers) < 2 and not self._repeats(sent, item.header):
            sent.answers.append(SignedAnswer(item.header, bytes(item.payload)))
        if key not in self._sent:
            self._convict(name, sent, self._contradiction(name, sent), RolloutPolicy({}, {}))
        return key in self._sent

    @staticmethod
    def _repeats(sent: _Sent, header: SignedHeader) -> bool:
        return bool(sent.answers) and digest_of_answer(sent.answers[0].header) == digest_of_answer(header)

    def _settle(self, name: str, sent: _Sent, policy: RolloutPolicy, model: PolicyModel) -> None:
        """Judge what a worker signed; it has no texts where it is convicted or has not answered."""
        if sent.answers and name in self._active:
            self._convict(name, sent, self._judged(name, sent, model), policy)

    def _convict(self, name: str, sent: _Sent, verdict: RolloutVerdict | None, policy: RolloutPolicy) -> None:
        if verdict is None:
            return
        case = RolloutCase(verdict, sent.header, sent.answers, self._check.tolerance, policy)
        written = write_rollout_evidence(self._desk, case)
        self.verdicts.append(written)
        self._drop(name)
        for (worker, _), other in self._sent.items():
            if worker == name:
                other.texts = ()
        self.told(written)

    def _contradiction(self, name: str, sent: _Sent) -> RolloutVerdict | None:
        return judge_second_answer(name, sent.request, [digest_of_answer(one.header) for one in sent.answers])

    def _judged(self, name: str, sent: _Sent, model: PolicyModel) -> RolloutVerdict | None:
        request, first = sent.request, sent.answers[0]
        twice = self._contradiction(name, sent)
        if twice is not None:
            return twice
        answer = parse_body(TO_OWNER, first.header.fields.kind, first.header.fields.body)
        if not isinstance(answer, RolloutAnswer):
            raise FrameError(f"{name}: its answer is a {answer.kind!r} message")
        sent.texts, formal = read_answer(name, request, answer, first.payload, model.vocab_size)
        return formal or self._checked(name, sent, model)

    def _checked(self, name: str, sent: _Sent, model: PolicyModel) -> RolloutVerdict | None:
        """Read a drawn share again."""
        begin = time.thread_time()
        drawn = [sent.texts[n] for n in self._share.of(name, sent.answers[0].header.digest, len(sent.texts))]
        tolerance, request = self._check.tolerance, sent.request
        reread = reread_rollouts(model, request, drawn, tolerance.margin)
        self.costs.check_s += time.thread_time() - begin
        self.costs.checked_texts += len(drawn)
        self.costs.checked_tokens += sum(len(one.ids) for one in drawn)
        # more tokens say more of their policy
        longest = max(drawn, key=lambda one: len(one.ids), default=None)
        for one, found in zip(drawn, reread, strict=True):
            verdict = (
                judge_rollout(name, request, one, found, tolerance)
                or (self._aged(name, request, one, found) if one is longest else None)
                or self._borders.add(name, request, found)
            )
            if verdict is None and self._reward is not None:
                verdict = judge_reward(name, request, one, self._reward)
            if verdict is not None:
                return verdict
        return None

    def _aged(self, name: str, request: RolloutRequest, one: Rollout, now: RereadRollout) -> RolloutVerdict | None:
        """Compare one text of an answer with the policy of the step before."""
        if self._kept.before is None:
            return None
        begin = time.thread_time()
        (older,) = reread_rollouts(self._kept.before[1], request, [one], self._check.tolerance.margin)
        self.costs.check_s += time.thread_time() - begin
        return judge_age(name, request, one, now, older)

    def _send_policy(self, name: str, policy: RolloutPolicy) -> None:
        if self._has.get(name) == policy.digest:
            return
        file = save({key: one.detach().cpu().contiguous().clone() for key, one in policy.tensors.items()})
        config = canonical_json(dict(policy.config)).decode()
        offer = PolicyOffer(policy=policy.digest, config=config, size_bytes=len(file))
        self._endpoint.send(name, offer.kind, offer.model_dump(mode="json"))
        for offset in range(0, len(file), _PART_BYTES):
            part = PolicyPart(policy=policy.digest, offset=offset)
            self._endpoint.send(name, part.kind, part.model_dump(mode="json"), [file[offset : offset + _PART_BYTES]])
        self._has[name] = policy.digest

    def _drop(self, name: str) -> None:
        if name in self._active:
            self._active.remove(name)
            self._endpoint.refuse(name)
