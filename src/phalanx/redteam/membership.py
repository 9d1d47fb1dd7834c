"""Membership: which texts a model was trained on, told by how likely it finds them."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch

from phalanx.redteam.finding import AttackFinding, Score
from phalanx.redteam.fitting import FittingPlan, fit_rows, fresh_like
from phalanx.redteam.target import Need, RowScores, Target, TextSet, score_rows
from phalanx.security.privacy.leakage import area_interval, area_under_curve, found_share, true_negative_share

_PLAN = FittingPlan(steps=120, rate=8e-3, enough=0.05)
_LOWEST_SHARE = 0.2
_WINDOWS = (2, 4, 8, 16)
_MEANING = (
    "Whoever has a text can tell whether it was in the training data, this reliably. Where membership itself is "
    "sensitive (patients, customers), do not give the weights away; train with [privacy], for fewer passes, or on "
    "deduplicated text."
)
_CLEAR = "The attack does not tell training texts from others better than guessing, on these rows and at this size."

RowScore = Callable[[RowScores, RowScores | None, int], float]
"""Of the target's scores, a reference's, and the bytes of the compressed text; larger ones speak for a member."""


def score_loss(row: RowScores, reference: RowScores | None, packed: int) -> float:
    """Mean log-probability (Yeom et al. 2018)."""
    return float(row.log_probs.mean())


def score_zlib(row: RowScores, reference: RowScores | None, packed: int) -> float:
    """Log-probability by the size of the compressed text (Carlini et al. 2021)."""
    return float(row.log_probs.sum()) / max(1, packed)


def score_min_k(row: RowScores, reference: RowScores | None, packed: int) -> float:
    """Mean of the least likely fifth, in standard deviations of each distribution (Zhang et al. 2024, Min-K%++)."""
    normal = (row.log_probs - row.means) / row.spreads
    return float(normal.sort().values[: max(1, int(_LOWEST_SHARE * len(normal)))].mean())


def score_reference(row: RowScores, reference: RowScores | None, packed: int) -> float:
    """Mean log-probability above that of a reference model (Carlini et al. 2021)."""
    other = row.means if reference is None else reference.log_probs
    return float((row.log_probs - other).mean())


def score_windows(row: RowScores, reference: RowScores | None, packed: int) -> float:
    """Share of windows of several lengths that are likelier than for a reference model (arXiv 2601.02751)."""
    other = row.means if reference is None else reference.log_probs
    gain = torch.cat([torch.zeros(1, dtype=torch.float64), (row.log_probs - other).cumsum(0)])
    votes = [float((gain[size:] - gain[:-size] > 0).double().mean()) for size in _WINDOWS if size < len(gain)]
    return fmean(votes or [0.5])


@dataclass(frozen=True)
class Membership:
    """An attack that gives each row a score.

    Attributes:
        score: Larger ones speak for a member.
    """

    name: str
    score: RowScore
    needs: tuple[Need, ...] = ("weights", "data")

    def run(self, target: Target) -> AttackFinding:
        """Compare the scores of members and strangers."""
        sides = [self._score_set(target, texts) for texts in (target.members, target.strangers)]
        return judge_membership(self.name, target, sides[0], sides[1])

    def _score_set(self, target: Target, texts: TextSet) -> list[float]:
        scores = score_rows(target.text_model.module, texts.rows)
        others: Sequence[RowScores | None] = [None] * len(scores)
        if target.reference is not None and "reference" in self.needs:
            others = score_rows(target.reference.module, texts.rows)
        sizes = [len(zlib.compress(target.decode(row).encode())) for row in texts.rows]
        return [self.score(*parts) for parts in zip(scores, others, sizes, strict=True)]


@dataclass(frozen=True)
class ShadowMembership:
    """LiRA: models are trained with and without each row, and a normal is fitted to either kind of loss.

    Attributes:
        shadows: Models, each of the target's architecture on a random half of all rows.
        plan: Length and rate of their training; as near to the target's own training as is known.

    Source: Carlini et al. 2022 (LiRA), on-line attack.
    """

    name: str = "membership_lira"
    shadows: int = 16
    plan: FittingPlan = _PLAN
    needs: tuple[Need, ...] = ("weights", "data")

    def run(self, target: Target) -> AttackFinding:
        """Train the shadows and compare likelihoods."""
        rows = [*target.members.rows, *target.strangers.rows]
        chance = torch.Generator().manual_seed(target.seed)
        losses: list[tuple[list[float], list[float]]] = [([], []) for _ in rows]
        for number in range(self.shadows):
            order = torch.randperm(len(rows), generator=chance).tolist()
            inside = set(order[: len(rows) // 2])
            shadow = fresh_like(target.text_model.module, target.seed + number + 1)
            fit_rows(shadow, [rows[place] for place in sorted(inside)], self.plan)
            for place, scores in enumerate(score_rows(shadow, rows)):
                losses[place][place not in inside].append(float(scores.log_probs.mean()))
        losses_of_target = [float(scores.log_probs.mean()) for scores in score_rows(target.text_model.module, rows)]
        ratios = [_log_ratio(loss, *pair) for loss, pair in zip(losses_of_target, losses, strict=True)]
        split = len(target.members)
        return judge_membership(self.name, target, ratios[:split], ratios[split:])


def _log_ratio(loss: float, inside: Sequence[float], outside: Sequence[float]) -> float:
    if len(inside) < 2 or len(outside) < 2:
        return 0.0
    densities = []
    for losses in (inside, outside):
        spread = max(pstdev(losses), 1e-3)
        densities.append(-0.5 * ((loss - fmean(losses)) / spread) ** 2 - math.log(spread))
    return densities[0] - densities[1]


def judge_membership(name: str, target: Target, members: Sequence[float], strangers: Sequence[float]) -> AttackFinding:
    """Return the finding of scores, larger ones speaking for a member."""
    area = area_under_curve(members, strangers)
    score = Score(area, area_interval(area, len(members), len(strangers)), 0.5, len(members) + len(strangers), "AUC")
    details = {
        "found_at_1_percent": found_share(members, strangers, 0.01),
        "found_at_0.1_percent": found_share(members, strangers, 0.001),
    }
    if name == "membership_loss":
        negative = [-value for value in members], [-value for value in strangers]
        details["true_negatives"] = true_negative_share(*negative)
    best = sorted(zip(members, range(len(members)), strict=True), reverse=True)[:3]
    examples = tuple(target.decode(target.members.rows[place])[:200] for _, place in best) if score.is_found else ()
    return AttackFinding(name, score, examples, _MEANING if score.is_found else _CLEAR, details)
