"""How many sites' updates every number that a rule returns is made of at the least, whatever sites send.

A rule that returns one site's update, or single values of it, hands out what secure sums hide. Loads no torch, so that
a run file is judged by the same numbers as a round.
"""

from collections.abc import Callable, Sequence

MIXED_BY_RULE: dict[str, Callable[[int, int], int]] = {
    "mean": lambda sites, byzantine: sites,
    # each value of the result is a value of one site, or the mean of two
    "median": lambda sites, byzantine: 1 if sites % 2 else 2,
    "trimmed_mean": lambda sites, byzantine: sites - 2 * byzantine,
    # one whole update
    "krum": lambda sites, byzantine: 1,
    "multi_krum": lambda sites, byzantine: sites - byzantine,
    # where one update is the point of the least distances, it has all of the weight
    "geometric_median": lambda sites, byzantine: 1,
    # the mean of all differences, cut to a radius that the middle one and all nearer ones keep within
    "centered_clipping": lambda sites, byzantine: (sites + 1) // 2,
    "mda": lambda sites, byzantine: sites - byzantine,
    # more weight than this is left, and no update has more than one of it
    "caf": lambda sites, byzantine: sites - 2 * byzantine,
}
"""By the name of a rule: takes how many sites there are and how many may lie, returns how many are mixed."""


def min_mixed(rule: str, byzantine: int, before: Sequence[str], sites: int) -> int:
    """Return how many sites every number of an aggregate is made of at the least.

    Args:
        rule: Name in `AGGREGATORS`.
        byzantine: Number of sites that may lie.
        before: Names in `PRE_STEPS`, in order.
        sites: That have sent an update.
    """
    rows, mixed_by_row = sites, 1
    for step in before:
        if step == "nnm":
            mixed_by_row = max(mixed_by_row, rows - byzantine)
        else:
            # the last of an odd number of updates stays alone; pairs are disjoint
            rows = (rows + 1) // 2
    return max(mixed_by_row, MIXED_BY_RULE[rule](rows, byzantine))
