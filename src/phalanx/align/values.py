"""Pairs on which values disagree: the rewards of each value for both answers, and their gap."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.align.prompts import AskedPrompt, prompt_of, read_records
from phalanx.errors import DataError
from phalanx.rewards import RewardScorer, ScoredText


def value_gaps(pairs: Sequence[AskedPrompt], values: RewardScorer, smallest: float) -> dict[str, Any]:
    """Return how much more each value gives the chosen answer of each pair, and where two of them disagree.

    Args:
        pairs: Pairs from `read_pairs`.
        values: The rewards, one a value, with the weights of their sum.
        smallest: A gap up to this is no opinion.

    Returns:
        ``accuracy``: by value, the share of pairs of which it prefers the chosen answer, ties half; ``disagreement``:
        by two values, the share of pairs on which both have opinions that differ; ``conflicts``: these pairs, with
        every gap and the weighted sum, the largest opposed gaps first.
    """
    names = values.reward_names
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        sides = [
            values.score_texts(
                [ScoredText(f"{pair.where}, {side}", pair.readable_text, pair.record[side], pair.record)]
            )[0]
            for side in ("chosen", "rejected")
        ]
        gaps = dict(zip(names, (worth - other for worth, other in zip(*sides, strict=True)), strict=True))
        total = values.total_reward(sides[0]) - values.total_reward(sides[1])
        rows.append({"where": pair.where, "prompt": pair.readable_text, "gaps": gaps, "sum": total})

    def opinion(gap: float) -> int:
        return 0 if abs(gap) <= smallest else 1 if gap > 0 else -1

    def opposed(row: dict[str, Any]) -> float:
        """The smaller of the largest gaps for and against."""
        gaps = [gap for gap in row["gaps"].values() if opinion(gap)]
        return min(max(gaps, default=0.0), -min(gaps, default=0.0))

    between = {
        f"{value} / {other}": sum(opinion(row["gaps"][value]) * opinion(row["gaps"][other]) < 0 for row in rows)
        / len(rows)
        for value, other in itertools.combinations(names, 2)
    }
    agreed = {name: sum(1 + opinion(row["gaps"][name]) for row in rows) / (2 * len(rows)) for name in names}
    conflicts = sorted((row for row in rows if opposed(row) > 0), key=opposed, reverse=True)
    return {"pairs": len(rows), "accuracy": agreed, "disagreement": between, "conflicts": conflicts}


def read_pairs(path: Path) -> list[AskedPrompt]:
    """Read pairs, as `phalanx align choose` writes them: a prompt with ``chosen`` and ``rejected``."""
    pairs = []
    for place, record in read_records(path):
        for side in ("chosen", "rejected"):
            if not isinstance(record.get(side), str) or not record[side].strip():
                raise DataError(f'{place}: field "{side}" holds {record.get(side)!r:.40}, expected text')
        pairs.append(prompt_of(record, place))
    return pairs
