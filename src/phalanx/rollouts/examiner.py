"""The examiner of one answer reads a drawn share again, and asks the one judge before it accuses a worker."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from phalanx.errors import EvidenceError, FrameError
from phalanx.pipeline.evidence.checked import Pins, certified_peers, peer_lookup
from phalanx.rollouts.bundle import AnsweredRequest, ControlModels, RolloutBundle, RolloutJudgement, judge_bundle
from phalanx.rollouts.config import RolloutCheck
from phalanx.rollouts.evidence import EvidenceDirectory, write_rollout_evidence
from phalanx.rollouts.judgement import BorderTally, RewardRule, judge_age, judge_reward, judge_rollout, read_answer
from phalanx.rollouts.messages import TO_OWNER
from phalanx.rollouts.policy import KeptPolicies, PolicyModel, RolloutPolicy
from phalanx.rollouts.prefill import RereadRollout, reread_rollouts
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import Rollout, RolloutAnswer
from phalanx.rollouts.share import CheckedShare
from phalanx.rollouts.standing import SentRequest
from phalanx.rollouts.verdict import RolloutDismissal, RolloutVerdict
from phalanx.transport import parse_body


@dataclass
class RolloutCosts:
    """Counts of a company's work so far.

    Attributes:
        texts: That were handed out for training.
        tokens: Number of tokens in these texts.
        checked_texts: Number of texts read again.
        checked_tokens: Number of tokens in these texts.
        check_s: CPU seconds of this process's thread for it.
    """

    texts: int = 0
    tokens: int = 0
    checked_texts: int = 0
    checked_tokens: int = 0
    check_s: float = 0.0


class Examination(NamedTuple):
    """The result of examining one answer.

    Attributes:
        texts: The texts, where all is in order.
        verdict: Convicts its worker; its evidence is written.
        dismissal: Has its worker left out.
        doubt: Why the texts cannot be used, though their worker is not convicted.
    """

    texts: tuple[Rollout, ...] = ()
    verdict: RolloutVerdict | None = None
    dismissal: RolloutDismissal | None = None
    doubt: str | None = None


class RolloutExaminer:
    """An examiner of answers; it alone convicts, and only where `judge_bundle` does.

    Args:
        share: Draws the texts that are read again.
        reward: Reward of a text; needed where workers report rewards.
    """

    def __init__(
        self, desk: EvidenceDirectory, check: RolloutCheck, share: CheckedShare, reward: RewardRule | None
    ) -> None:
        self._evidence_directory, self._share, self._reward = desk, share, reward
        self._unread_weight = check.unread_weight
        self._peer = peer_lookup(certified_peers(desk.directory, desk, Pins())[1])
        self._borders = BorderTally(check.tolerance.border_rate)
        self._policies = KeptPolicies()
        self._controls: ControlModels | None = None
        self.costs = RolloutCosts()

    def keep_weights(self, policy: RolloutPolicy, device: str) -> None:
        """Keep a copy of these weights beside those before."""
        if self._share.rate > 0.0:
            self._policies.keep_policy(policy, device)
        if self._controls is None:
            self._controls = ControlModels(device)

    def examine_answer(
        self, sent: SentRequest, policy: RolloutPolicy, model: PolicyModel, earlier: Sequence[SentRequest]
    ) -> Examination:
        """Read an answer, and a drawn share of its texts again.

        Args:
            policy: The weights that the request names.
            earlier: Other requests to this worker that it has answered.
        """
        request = sent.request
        if sent.answer is None:
            return Examination(doubt="it was silent")
        header, payload = sent.answer
        answer = parse_body(TO_OWNER, header.fields.kind, header.fields.body)
        if not isinstance(answer, RolloutAnswer):
            raise FrameError(f"{sent.worker}: its answer is a {answer.kind!r} message")
        bundle = RolloutBundle(sent.worker, sent.header, sent.answer, policy)
        texts, formal = read_answer(sent.worker, request, answer, payload, model.vocab_size)
        if formal is not None:
            place = None if formal.prompt is None or formal.sample is None else (formal.prompt, formal.sample)
            return self._examination_of(self.judge_records(replace(bundle, place=place)), formal.reason)
        older = [
            AnsweredRequest(answered.header, answered.answer.header)
            for answered in earlier
            if self._is_before(answered) and answered.answer
        ]
        return self._reread_texts(bundle, request, texts, model, older[-1] if older else None)

    def judge_records(self, bundle: RolloutBundle) -> RolloutJudgement:
        """Have the one judge decide; where it convicts, the records are written down as evidence."""
        try:
            with self._time_check():
                judgement = judge_bundle(
                    bundle, self._evidence_directory.session, self._peer, self._controls or ControlModels()
                )
        except EvidenceError as exc:
            return RolloutJudgement(doubt=str(exc))
        if judgement.verdict is None:
            return judgement
        return RolloutJudgement(write_rollout_evidence(self._evidence_directory, bundle, judgement.verdict))

    def _reread_texts(
        self,
        bundle: RolloutBundle,
        request: RolloutRequest,
        texts: tuple[Rollout, ...],
        model: PolicyModel,
        older: AnsweredRequest | None,
    ) -> Examination:
        places = self._share.draw_texts(bundle.party, bundle.answer.header.header_digest, len(texts))
        drawn = [texts[n] for n in places]
        with self._time_check():
            reread = reread_rollouts(model, request, drawn, request.tolerance.margin)
        self.costs.checked_texts += len(drawn)
        self.costs.checked_tokens += sum(len(rollout.ids) for rollout in drawn)
        # more tokens say more of their policy
        longest = max(drawn, key=lambda one: len(one.ids), default=None)
        for text, now in zip(drawn, reread, strict=True):
            accused = replace(bundle, place=(text.prompt, text.sample))
            suspicion = judge_rollout(bundle.party, request, text, now)
            if suspicion is None and text is longest:
                suspicion = self._judge_age(bundle.party, request, text, now)
                before = self._policies.before
                if suspicion is not None and older is not None and before is not None:
                    accused = replace(accused, older=older, older_policy=before.as_policy)
            judgement = RolloutJudgement(reread=now) if suspicion is None else self.judge_records(accused)
            if judgement.reread is None:
                return self._examination_of(judgement, "" if suspicion is None else suspicion.reason)
            dismissal = self._borders.add_text(bundle.party, request, judgement.reread)
            if dismissal is None and self._reward is not None:
                dismissal = judge_reward(bundle.party, request, text, self._reward)
            if dismissal is not None:
                return Examination(dismissal=dismissal)
        return Examination(tuple(self._weigh_text(text, is_read=n in places) for n, text in enumerate(texts)))

    def _weigh_text(self, text: Rollout, *, is_read: bool) -> Rollout:
        # a reward that no rule checks is no more than a worker's word
        reward = text.reward if self._reward else None
        return replace(text, reward=reward, weight=1.0 if is_read else self._unread_weight)

    @staticmethod
    def _examination_of(judgement: RolloutJudgement, suspicion: str) -> Examination:
        if judgement.verdict is not None:
            return Examination(verdict=judgement.verdict)
        return Examination(doubt=judgement.doubt or suspicion)

    def _is_before(self, sent: SentRequest) -> bool:
        return self._policies.before is not None and sent.request.policy == self._policies.before.digest

    def _judge_age(
        self, name: str, request: RolloutRequest, text: Rollout, now: RereadRollout
    ) -> RolloutVerdict | None:
        """Compare one text of an answer with the policy of the step before."""
        if self._policies.before is None:
            return None
        with self._time_check():
            (older,) = reread_rollouts(self._policies.before.model, request, [text], request.tolerance.margin)
        return judge_age(name, request, text, now, older)

    @contextlib.contextmanager
    def _time_check(self) -> Iterator[None]:
        begin = time.thread_time()
        try:
            yield
        finally:
            self.costs.check_s += time.thread_time() - begin
