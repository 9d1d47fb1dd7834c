"""Judges of rollouts: facts in, a verdict out; none of them reads a file or waits for a message."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import FrameError
from phalanx.rollouts.prefill import RereadRollout
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import Rollout, RolloutAnswer, describe_misfit, unpack_answer
from phalanx.rollouts.verdict import RolloutDismissal, RolloutOffence, RolloutVerdict

RewardRule = Callable[[Rollout], float]
"""Function from the tokens of a text to its reward."""

REWARD_SLACK = 1e-6
"""Between a reward as reported and as computed: sums in another order."""

FALSE_ALARM = 1e-9
"""Chance that `too_many_borders` accuses an honest worker in one look."""

SURE_SHARE = 0.1
"""Of `RolloutTolerance.margin`: allowed of a draw where log-probabilities agree to the last bits."""
MARGIN_OF_NOISE = 8.0
"""A draw may be lost by so many times the largest distance of a log-probability in the same text."""
BORDERS_OF_NOISE = 4.0
"""Two scores of a race are nearer than x with a chance of at most x, and x is at most so many times the noise."""
MIN_NOISE = 1e-6
"""Of log-probabilities that float32 can tell apart."""

OLDER_FIT = 2.0
"""So many times nearer to the older policy are the claims of a worker that used it, at least."""
OLDER_EVIDENCE = 40.0
"""Nats by which the older policy must explain the claims better; by luck, one chance in 10^17."""


def read_answer(
    worker: str, request: RolloutRequest, answer: RolloutAnswer, payload: bytes, vocab_size: int
) -> tuple[tuple[Rollout, ...], RolloutVerdict | None]:
    """Read an answer to this request, and judge what needs no weights.

    Args:
        worker: The party that signed the answer.
        request: The one that the answer names.

    Returns:
        The texts, where they can be read, and a verdict where some are texts that no honest worker sends.
    """
    try:
        texts = unpack_answer(request, answer, payload)
    except FrameError as exc:
        return (), _make_verdict(worker, request, "form", str(exc))
    return texts, judge_texts(worker, request, texts, vocab_size)


def judge_texts(
    worker: str, request: RolloutRequest, rollouts: Sequence[Rollout], vocab_size: int
) -> RolloutVerdict | None:
    """Judge what needs no weights: that all texts are there, and are texts that can be."""
    places = tuple((rollout.prompt, rollout.sample) for rollout in rollouts)
    if places != request.text_places:
        return _make_verdict(
            worker, request, "form", f"sent {len(places)} texts, expected {len(request.text_places)} in order"
        )
    for rollout in rollouts:
        wrong = describe_misfit(request, rollout, vocab_size)
        if wrong is not None:
            return _make_verdict(worker, request, "form", f"{_describe_place(rollout)} {wrong}", rollout)
    return None


def judge_rollout(worker: str, request: RolloutRequest, one: Rollout, reread: RereadRollout) -> RolloutVerdict | None:
    """Judge one text by the reading of the right weights, with the tolerance of the request.

    Guarantees:
        Nothing that is no number passes. What passes was drawn by the rule, token by token, but where two tokens were
        nearly equal; `BorderTally` bounds these. Where log-probabilities are the checker's to the last bits, so are
        logits, and draws are held to a tenth of the tolerance.
    """
    for look in _list_claim_checks(request, reread):
        beyond = look.beyond_allowed
        if beyond.any():
            worst = float(np.max(look.values)) if np.isfinite(look.values).all() else math.inf
            return _make_verdict(
                worker,
                request,
                look.offence,
                f"{_describe_place(one)}: {look.what}: first at token {int(np.argmax(beyond)) * look.every}, "
                f"{int(beyond.sum())} of {len(look.values)}, worst {worst:.1e}, allowed {look.allowed:.1e}",
                one,
                measured=worst if math.isfinite(worst) else None,
                allowed=look.allowed,
                checked=len(one.ids),
            )
    return None


def first_fault(request: RolloutRequest, reread: RereadRollout) -> int | None:
    """Return the first token of a text at which a claim is beyond the tolerance of the request; None where none is."""
    faults = (
        int(np.argmax(look.beyond_allowed)) * look.every
        for look in _list_claim_checks(request, reread)
        if look.beyond_allowed.any()
    )
    return min(faults, default=None)


class _ClaimCheck(NamedTuple):
    """One kind of claim: distances of every so many tokens, and the allowed distance."""

    offence: RolloutOffence
    values: NDArray[np.float64]
    allowed: float
    every: int
    what: str

    @property
    def beyond_allowed(self) -> NDArray[np.bool_]:
        # never "larger than": that would let pass what is no number
        return ~(self.values <= self.allowed)


def _list_claim_checks(request: RolloutRequest, reread: RereadRollout) -> tuple[_ClaimCheck, ...]:
    tolerance, every = request.tolerance, request.sampler.sketch_every
    # a cold draw makes more of every distance between logits
    logprob = tolerance.logprob / min(1.0, request.sampler.logit_divisor)
    margin, wrong = _allowed_margin(request, reread), "its log-probabilities are not those of the weights"
    foreign = "its hidden states are of other weights or another prompt"
    return (
        _ClaimCheck("sketch", reread.sketch_gaps, tolerance.sketch, every, foreign),
        _ClaimCheck("logprob", reread.logprob_gaps, logprob, 1, wrong),
        _ClaimCheck("draw", reread.margins, margin, 1, "a token lost its draw"),
    )


def _allowed_margin(request: RolloutRequest, reread: RereadRollout) -> float:
    """By how many logits a token of this text may have lost: what its own log-probabilities say of the noise."""
    noise, margin = float(reread.logprob_gaps.max()) * request.sampler.logit_divisor, request.tolerance.margin
    return min(margin, max(SURE_SHARE * margin, MARGIN_OF_NOISE * noise))


def judge_age(
    worker: str, request: RolloutRequest, one: Rollout, now: RereadRollout, older: RereadRollout
) -> RolloutVerdict | None:
    """Judge whether a text was committed to by an older policy, however little the policy has moved since.

    Args:
        worker: The party that signed it.
        request: Request that this worker received.
        now: Reading by the policy of the request.
        older: Reading by the policy before that, computed in the same way.

    Guarantees:
        No tolerance is used: one text is compared with itself under two policies. Honest log-probabilities are off from
        the present policy by rounding, and from an older one by no less; for a false alarm rounding would have to be
        what training changed, token by token.

    Source: Neyman and Pearson 1933, the ratio of two likelihoods.
    """
    near, far = (_root_mean_square(rereading.logprob_gaps) for rereading in (older, now))
    tokens = len(one.ids)
    ratio = far / max(near, float(np.finfo(np.float32).eps))
    if not math.isfinite(ratio) or ratio < OLDER_FIT or tokens * math.log(ratio) < OLDER_EVIDENCE:
        return None
    return _make_verdict(
        worker,
        request,
        "stale",
        f"{_describe_place(one)}: its log-probabilities are off by {far:.1e} from the policy of the request "
        f"and by {near:.1e} "
        f"from the one before, over {tokens} tokens",
        one,
        measured=ratio,
        allowed=OLDER_FIT,
        checked=tokens,
    )


def _root_mean_square(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def judge_reward(worker: str, request: RolloutRequest, one: Rollout, rule: RewardRule) -> RolloutDismissal | None:
    """Judge a reward that a worker reports, by a rule that the owner alone has."""
    if one.reward is None:
        return None
    earned = rule(one)
    if abs(one.reward - earned) <= REWARD_SLACK * max(1.0, abs(earned)):
        return None
    reason = f"{_describe_place(one)} earns {earned:g}, its worker says {one.reward:g}"
    return RolloutDismissal(party=worker, step=request.step, cause="reward", reason=reason)


def judge_second_answer(worker: str, request: RolloutRequest, digests: Sequence[str]) -> RolloutVerdict | None:
    """Judge all answers that name one request and that one certificate signed, by `digest_of_answer`, in order."""
    if digests[-1] == digests[0]:
        return None
    return _make_verdict(worker, request, "equivocation", "signed two different answers to one request")


class BorderTally:
    """An account for each worker of how often another token won at the checker, within the tolerance.

    One such token proves nothing. A worker that always takes the second-best where two are nearly equal has far more of
    them than rounding gives, and how much rounding there is its log-probabilities say.

    Args:
        rate: The share of honest tokens that rounding decides otherwise, at most.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._tokens: dict[str, int] = {}
        self._expected: dict[str, float] = {}
        self._differing: dict[str, int] = {}

    def add_text(self, worker: str, request: RolloutRequest, reread: RereadRollout) -> RolloutDismissal | None:
        """Enter one text that was within the tolerance; a dismissal where its worker has too many by now.

        Nobody is convicted: the counts are spread over all answers of the worker, more than evidence can hold.
        """
        tokens = self._tokens[worker] = self._tokens.get(worker, 0) + len(reread.differs)
        noise = max(_root_mean_square(reread.logprob_gaps), MIN_NOISE)
        here = len(reread.differs) * min(self._rate, BORDERS_OF_NOISE * noise)
        expected = self._expected[worker] = self._expected.get(worker, 0.0) + here
        differing = self._differing[worker] = self._differing.get(worker, 0) + int(reread.differs.sum())
        if not too_many_borders(differing, tokens, expected / tokens):
            return None
        reason = (
            f"took the second-best of two nearly equal tokens {differing} times in {tokens} tokens, "
            f"rounding does {expected:.1g} times"
        )
        return RolloutDismissal(party=worker, step=request.step, cause="borders", reason=reason)


def too_many_borders(differing: int, tokens: int, rate: float) -> bool:
    """Whether an honest worker has so many but for one chance in a thousand million (a Poisson tail)."""
    mean = rate * tokens
    if differing <= mean:
        return False
    # P(X >= differing), bounded by the first term times a geometric series
    log_first = differing * math.log(mean) - mean - math.lgamma(differing + 1) if mean > 0.0 else -math.inf
    return log_first - math.log1p(-mean / (differing + 1)) < math.log(FALSE_ALARM)


def _describe_place(one: Rollout) -> str:
    return f"prompt {one.prompt}, sample {one.sample}"


def _make_verdict(
    worker: str,
    request: RolloutRequest,
    offence: RolloutOffence,
    reason: str,
    one: Rollout | None = None,
    *,
    measured: float | None = None,
    allowed: float | None = None,
    checked: int = 0,
) -> RolloutVerdict:
    return RolloutVerdict(
        party=worker,
        step=request.step,
        request=request.request_digest,
        offence=offence,
        reason=reason,
        prompt=None if one is None else one.prompt,
        sample=None if one is None else one.sample,
        measured=measured,
        allowed=allowed,
        checked=checked,
    )
