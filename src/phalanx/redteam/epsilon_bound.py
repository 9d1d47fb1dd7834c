"""What success of an attacker proves about epsilon: bounds, at a confidence, that no true guarantee is below."""

import math
from collections.abc import Callable, Sequence

_CLOSE, _LARGEST = 1e-3, 50.0


def bound_from_one_run(candidates: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> float:
    """Return the epsilon that one run is shown to exceed.

    Each of some candidates was in the training or not, by a fair coin; the attacker guesses some of them.

    Args:
        guesses: Number of coins that the attacker guesses.
        confidence: Probability with which the bound holds.

    Source: Steinke, Nasr and Jagielski 2023, theorem 5.2.
    """
    from scipy import stats  # noqa: PLC0415 - it takes a second

    def is_refuted(epsilon: float) -> bool:
        chance = 1 / (1 + math.exp(-epsilon))
        worst, total = 0.0, 0.0
        for fewer in range(1, right + 1):
            total += float(stats.binom.pmf(right - fewer, guesses, chance))
            worst = max(worst, total / fewer)
        p_value = float(stats.binom.sf(right - 1, guesses, chance)) + worst * delta * 2 * candidates
        return p_value < 1 - confidence

    return _largest_refuted(is_refuted)


def bound_from_many_runs(
    absent: Sequence[float], present: Sequence[float], delta: float, confidence: float = 0.95
) -> float:
    """Return the epsilon that runs with and without one row are shown to exceed, by a threshold on one number of each.

    The threshold is chosen on the first half of the runs, and judged on the second.

    Args:
        absent: A number of each run without the row.
        present: Likewise with it; larger ones speak for it.
        confidence: Probability with which the bound holds.
    """
    half = min(len(absent), len(present)) // 2
    learnt = [
        (cut, _epsilon_bound(absent[:half], present[:half], cut, delta, confidence)) for cut in sorted(absent[:half])
    ]
    cut = max(learnt, key=lambda pair: pair[1])[0]
    return _epsilon_bound(absent[half:], present[half:], cut, delta, confidence)


def _epsilon_bound(
    absent: Sequence[float], present: Sequence[float], cut: float, delta: float, confidence: float
) -> float:
    """Clopper and Pearson's bounds of both rates, each with half of what may fail."""
    from scipy import stats  # noqa: PLC0415 - it takes a second

    doubt = (1 - confidence) / 2
    num_above = sum(score > cut for score in present)
    wrong = sum(score > cut for score in absent)
    least = float(stats.beta.ppf(doubt, num_above, len(present) - num_above + 1)) if num_above else 0.0
    upper_share = float(stats.beta.ppf(1 - doubt, wrong + 1, len(absent) - wrong)) if wrong < len(absent) else 1.0
    return max(0.0, math.log((least - delta) / upper_share)) if least > delta else 0.0


def _largest_refuted(is_refuted: Callable[[float], bool]) -> float:
    low, high = 0.0, _LARGEST
    if not is_refuted(low):
        return 0.0
    while high - low > _CLOSE:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low
