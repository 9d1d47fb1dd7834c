"""The judge of a text: how likely its tokens are where nobody marked it."""

import math
from collections.abc import Sequence
from typing import Literal

import torch

from phalanx.config import StrictModel
from phalanx.models.token_draw import uniform_numbers
from phalanx.serve.marks.keys import MarkKey
from phalanx.serve.marks.race import LANES, mark_row_keys, marked_places

MIN_TOKENS = 16
"""Places below which nothing is said."""
ENOUGH_TOKENS = 200
"""Places from which on the absence of a sign counts as one."""
MAX_P_VALUE = 1e-6
_NO_SIGN = 0.01


class MarkVerdict(StrictModel):
    """The verdict on one text.

    Attributes:
        p_value: At most the probability of so strong a sign, or a stronger one, in a text that was written without any
            of the keys; exact for one key, and multiplied by the number of tests.
        log10_p_value: Its logarithm, which is still exact where the value is 0 in a float.
        num_tokens: Places that counted: behind a whole context that had not stood before.
        num_tests: Number of keys times number of lanes.
        epoch: Epoch of the key with the strongest sign.
        verdict: ``not marked`` says that a text of this length shows no sign of these keys: it may have been rewritten,
            or its model may have had little choice.
    """

    p_value: float
    log10_p_value: float
    num_tokens: int
    num_tests: int
    epoch: int | None
    verdict: Literal["marked", "not marked", "cannot tell"]


def detect_mark(
    tokens: Sequence[int],
    keys: Sequence[MarkKey],
    *,
    max_p_value: float = MAX_P_VALUE,
    min_tokens: int = MIN_TOKENS,
) -> MarkVerdict:
    """Look for the mark of any of some keys.

    Args:
        tokens: Tokens of the text alone, without begin or end of text.
        keys: At least 1 key, of any epochs.
        max_p_value: Largest p-value of a marked text.
        min_tokens: Places below which the verdict is ``cannot tell``.

    Guarantees:
        A text that does not depend on a key is called marked with at most the probability `max_p_value`, whatever it
        says and however often it repeats itself: places with distinct contexts have independent uniform numbers.
    """
    places = marked_places(tokens)
    num_tests = len(keys) * LANES
    if len(places) < max(min_tokens, 1):
        return MarkVerdict(
            p_value=1.0, log10_p_value=0.0, num_tokens=len(places), num_tests=num_tests, epoch=None,
            verdict="cannot tell",
        )  # fmt: skip
    chosen = torch.tensor([[token] for _, token in places])
    contexts = [context for context, _ in places]
    best, epoch = math.inf, None
    for key in keys:
        for lane in range(LANES):
            numbers = uniform_numbers(mark_row_keys(key, lane, contexts), chosen)
            score = -float(torch.log1p(-numbers).sum())
            log_p = log_gamma_tail(len(places), score)
            if log_p < best:
                best, epoch = log_p, key.epoch
    log10_p = min(0.0, best + math.log(num_tests)) / math.log(10)
    p_value = 10.0**log10_p
    return MarkVerdict(
        p_value=p_value,
        log10_p_value=log10_p,
        num_tokens=len(places),
        num_tests=num_tests,
        epoch=epoch,
        verdict=_verdict_of(log10_p, math.log10(max_p_value), len(places)),
    )


def log_gamma_tail(shape: int, score: float) -> float:
    """Return the logarithm of the probability that a sum of `shape` standard exponentials is at least `score`.

    Exact: for a whole shape the tail of the Gamma distribution is a sum of Poisson terms.
    """
    if score <= 0.0:
        return 0.0
    counts = torch.arange(shape, dtype=torch.float64)
    terms = counts * math.log(score) - torch.lgamma(counts + 1)
    return min(0.0, float(terms.logsumexp(dim=0)) - score)


def _verdict_of(log10_p: float, log10_limit: float, num_tokens: int) -> Literal["marked", "not marked", "cannot tell"]:
    if log10_p <= log10_limit:
        return "marked"
    return "not marked" if num_tokens >= ENOUGH_TOKENS and log10_p > math.log10(_NO_SIGN) else "cannot tell"
