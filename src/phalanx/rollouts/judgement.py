"""Judges of rollouts: facts in, a verdict out; none of them reads a file or waits for a message."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import FrameError
from phalanx.rollouts.prefill import RereadRollout
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import Rollout, RolloutAnswer, misfit, unpack_answer
from phalanx.rollouts.verdict import RolloutOffence, RolloutTolerance, RolloutVerdict

RewardRule = Callable[[Rollout], float]
"""What a text earns, by its tokens alone."""

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
LEAST_NOISE = 1e-6
"""Of log-probabilities that float32 can tell apart."""

OLDER_FIT = 2.0
"""So many times nearer to the older policy are the claims of a worker that used it, at least."""
OLDER_EVIDENCE = 40.0
"""Nats by which the older policy must explain the claims better; by luck, one chance in 10^17."""


def read_answer(
    worker: str, request: RolloutRequest, answer: RolloutAnswer, payload: bytes, vocab_size: int
) -> tuple[tuple[Rollout, ...], RolloutVerdict | None]:
    """Read an answer, and judge what needs no weights.

    Args:
        worker: The party that signed the answer.
        request: As it was sent to this worker.
        answer: Its words.
        payload: Its numbers.
        vocab_size: Of the model.

    Returns:
        The texts, where they can be read, and a verdict where the answer is to something else than was asked or has
        texts that no honest worker sends.
    """
    if (answer.step, answer.policy, answer.request) != (request.step, request.policy, request.digest):
        said = f"step {answer.step}, policy {answer.policy[:16]}, request {answer.request[:16]}"
        asked = f"step {request.step}, policy {request.policy[:16]}, request {request.digest[:16]}"
        return (), _verdict(worker, request, "request", f"answered {said}; asked for {asked}")
    try:
        texts = unpack_answer(request, answer, payload)
    except FrameError as exc:
        return (), _verdict(worker, request, "form", str(exc))
    return texts, judge_texts(worker, request, texts, vocab_size)


def judge_texts(
    worker: str, request: RolloutRequest, rollouts: Sequence[Rollout], vocab_size: int
) -> RolloutVerdict | None:
    """Judge what needs no weights: that all texts are there, and are texts that can be."""
    places = tuple((one.prompt, one.sample) for one in rollouts)
    if places != request.places:
        return _verdict(worker, request, "form", f"sent {len(places)} texts, expected {len(request.places)} in order")
    for one in rollouts:
        wrong = misfit(request, one, vocab_size)
        if wrong is not None:
            return _verdict(worker, request, "form", f"{_place(one)} {wrong}", one)
    return None


def judge_rollout(
    worker: str, request: RolloutRequest, one: Rollout, reread: RereadRollout, tolerance: RolloutTolerance
) -> RolloutVerdict | None:
    """Judge one text by what the right weights say of it.

    Guarantees:
        Nothing that is no number passes. What passes was drawn by the rule, token by token, but where two tokens were
        nearly equal; `BorderBook` bounds these. Where log-probabilities are the checker's to the last bits, so are
        logits, and draws are held to a tenth of the tolerance.
    """
    looks: tuple[tuple[RolloutOffence, NDArray[np.float64], float, str], ...] = (
        ("sketch", reread.sketch_gaps, tolerance.sketch, "its hidden states are of other weights or another prompt"),
        ("logprob", reread.logprob_gaps, tolerance.logprob, "its log-probabilities are not those of the weights"),
        ("draw", reread.margins, _allowed_margin(request, reread, tolerance), "a token lost its draw"),
    )
    for offence, values, allowed, what in looks:
        # never "larger than": that would let pass what is no number
        beyond = ~(values <= allowed)
        if beyond.any():
            at = int(np.argmax(beyond))
            worst = float(np.max(values)) if np.isfinite(values).all() else math.inf
            position = at * request.sampler.sketch_every if offence == "sketch" else at
            return _verdict(
                worker,
                request,
                offence,
                f"{_place(one)}: {what}: first at token {position}, {int(beyond.sum())} of {len(values)}, "
                f"worst {worst:.1e}, allowed {allowed:.1e}",
                one,
                measured=worst if math.isfinite(worst) else None,
                allowed=allowed,
                checked=len(one.ids),
            )
    return None


def _allowed_margin(request: RolloutRequest, reread: RereadRollout, tolerance: RolloutTolerance) -> float:
    """By how many logits a token of this text may have lost: what its own log-probabilities say of the noise."""
    noise = MARGIN_OF_NOISE * float(reread.logprob_gaps.max()) * request.sampler.divisor
    return min(tolerance.margin, max(SURE_SHARE * tolerance.margin, noise))


def judge_age(
    worker: str, request: RolloutRequest, one: Rollout, now: RereadRollout, older: RereadRollout
) -> RolloutVerdict | None:
    """Judge whether a text was committed to by an older policy, however little the policy has moved since.

    Args:
        worker: The party that signed it.
        request: As it was sent to this worker.
        one: The text.
        now: What the policy of the request says of it.
        older: What the policy before that says of it, read in the same way.

    Guarantees:
        No tolerance is used: one text is compared with itself under two policies. Honest log-probabilities are off from
        the present policy by rounding, and from an older one by no less; for a false alarm rounding would have to be
        what training changed, token by token.

    Source: Neyman and Pearson 1933, the ratio of two likelihoods.
    """
    near, far = (_root_mean_square(found.logprob_gaps) for found in (older, now))
    tokens = len(one.ids)
    ratio = far / max(near, float(np.finfo(np.float32).eps))
    if not math.isfinite(ratio) or ratio < OLDER_FIT or tokens * math.log(ratio) < OLDER_EVIDENCE:
        return None
    return _verdict(
        worker,
        request,
        "stale",
        f"{_place(one)}: its log-probabilities are off by {far:.1e} from the policy of the request and by {near:.1e} "
        f"from the one before, over {tokens} tokens",
        one,
        measured=ratio,
        allowed=OLDER_FIT,
        checked=tokens,
    )


def _root_mean_square(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def judge_reward(worker: str, request: RolloutRequest, one: Rollout, rule: RewardRule) -> RolloutVerdict | None:
    """Judge a reward that a worker reports; one that it leaves to the owner is none."""
    if one.reward is None:
        return None
    earned = rule(one)
    gap = abs(one.reward - earned)
    if gap <= REWARD_SLACK * max(1.0, abs(earned)):
        return None
    measured = gap if math.isfinite(gap) else None
    reason = f"{_place(one)} earns {earned:g}, its worker says {one.reward:g}"
    return _verdict(worker, request, "reward", reason, one, measured=measured, allowed=REWARD_SLACK)


def judge_second_answer(worker: str, request: RolloutRequest, digests: Sequence[str]) -> RolloutVerdict | None:
    """Judge all answers that a worker signed to one request, by the digests of their words and numbers, in order."""
    if digests[-1] == digests[0]:
        return None
    return _verdict(worker, request, "equivocation", "signed two different answers to one request")


class BorderBook:
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

    def add(self, worker: str, request: RolloutRequest, reread: RereadRollout) -> RolloutVerdict | None:
        """Enter one text that was within the tolerance; a verdict where its worker has too many by now."""
        tokens = self._tokens[worker] = self._tokens.get(worker, 0) + len(reread.differs)
        noise = max(_root_mean_square(reread.logprob_gaps), LEAST_NOISE)
        here = len(reread.differs) * min(self._rate, BORDERS_OF_NOISE * noise)
        expected = self._expected[worker] = self._expected.get(worker, 0.0) + here
        differing = self._differing[worker] = self._differing.get(worker, 0) + int(reread.differs.sum())
        if not too_many_borders(differing, tokens, expected / tokens):
            return None
        return _verdict(
            worker,
            request,
            "borders",
            f"took the second-best of two nearly equal tokens {differing} times in {tokens} tokens, "
            f"rounding does {expected:.1g} times",
            measured=differing / tokens,
            allowed=expected / tokens,
            checked=tokens,
        )


def too_many_borders(differing: int, tokens: int, rate: float) -> bool:
    """Whether an honest worker has so many but for one chance in a thousand million (a Poisson tail)."""
    mean = rate * tokens
    if differing <= mean:
        return False
    # P(X >= differing), bounded by the first term times a geometric series
    log_first = differing * math.log(mean) - mean - math.lgamma(differing + 1) if mean > 0.0 else -math.inf
    return log_first - math.log1p(-mean / (differing + 1)) < math.log(FALSE_ALARM)


def _place(one: Rollout) -> str:
    return f"prompt {one.prompt}, sample {one.sample}"


def _verdict(
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
        request=request.digest,
        offence=offence,
        reason=reason,
        prompt=None if one is None else one.prompt,
        sample=None if one is None else one.sample,
        measured=measured,
        allowed=allowed,
        checked=checked,
    )
