"""Planted training texts: groups that stand apart in a model's hidden states, and phrases with one continuation."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.redteam.finding import AttackFinding, Score
from phalanx.redteam.target import Need, Target
from phalanx.security.privacy.leakage import wilson_interval

Array = NDArray[np.float64]
_NULLS, _RESAMPLES = 40, 200
_MIN_TEXTS = 20
_MAX_SHARE = 0.35
_EXAMPLES = 5
_MEANING = (
    "A small group of training texts stands apart from all others inside the model. Read the examples: texts that "
    "share a phrase and what follows it are planted; drop them in the recipe and train again."
)
_CLEAR = "No small group of training texts stands apart from the others more than chance makes one."

Statistic = Callable[[Array], tuple[Array, NDArray[np.bool_]]]
"""Of states ``[texts, features]``: how far each text of the group stands apart, and which texts it is."""


@dataclass(frozen=True)
class PoisonedStates:
    """A statistic of the mean hidden state of each training text, against texts of a normal with the same covariance.

    Attributes:
        statistic: See `cluster_apart` and `spectrum_apart`.
    """

    name: str
    statistic: Statistic
    needs: tuple[Need, ...] = ("weights", "texts")

    def run(self, target: Target) -> AttackFinding:
        """Compare the statistic with its null."""
        texts = target.members
        if len(texts) < _MIN_TEXTS:
            return AttackFinding(self.name, reason=f"{len(texts)} training texts; {_MIN_TEXTS} at least show a group")
        states = _mean_states(target)
        chance = np.random.default_rng(target.seed)
        distances, group = self.statistic(states)
        value = float(distances.mean())
        resampled = [chance.choice(distances, len(distances)).mean() for _ in range(_RESAMPLES)]
        null = [float(self.statistic(_normal_like(states, chance))[0].mean()) for _ in range(_NULLS)]
        low, high = (float(np.quantile(resampled, share)) for share in (0.025, 0.975))
        score = Score(
            value,
            (min(low, value), max(high, value)),
            float(np.mean(null)),
            len(states),
            "distance of a group",
            max(null),
        )
        chosen = [number for number in np.flatnonzero(group)][:_EXAMPLES] if score.is_found else []
        examples = tuple(f"{texts.names[number]}: {target.decode(texts.rows[number])[:160]}" for number in chosen)
        details = {"texts_in_group": float(group.sum())}
        return AttackFinding(self.name, score, examples, _MEANING if score.is_found else _CLEAR, details)


@torch.no_grad()
def _mean_states(target: Target) -> Array:
    module = target.text_model.module
    rows = [
        module(input_ids=torch.tensor([row], device=module.device), output_hidden_states=True)
        .hidden_states[-1][0]
        .mean(0)
        for row in target.members.rows
    ]
    states = torch.stack(rows).double().cpu().numpy()
    return np.asarray(states - states.mean(0), np.float64)


def _normal_like(states: Array, chance: np.random.Generator) -> Array:
    """Return states of a normal with the same covariance."""
    return np.asarray(chance.standard_normal((len(states), len(states))) @ states / np.sqrt(len(states)), np.float64)


def cluster_apart(states: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return the silhouettes of the best small one of two clusters along the leading directions.

    Source: Chen et al. 2018 (activation clustering).
    """
    x = _leading(states, 4)
    best, group = np.zeros(1), np.zeros(len(x), bool)
    for axis in range(x.shape[1]):
        member = x[:, axis] > np.median(x[:, axis])
        for _ in range(20):
            if not 0 < member.sum() < len(x):
                break
            centres = x[~member].mean(0), x[member].mean(0)
            nearer = np.linalg.norm(x - centres[1], axis=1) < np.linalg.norm(x - centres[0], axis=1)
            if (nearer == member).all():
                break
            member = nearer
        small = member if member.sum() <= len(x) / 2 else ~member
        if 2 <= small.sum() <= _MAX_SHARE * len(x) and (values := _silhouettes(x, small)).mean() > best.mean():
            best, group = values, small
    return best, group


def spectrum_apart(states: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return the distances of the farthest tenth of the texts along one leading direction, in median distances.

    Source: Tran et al. 2018 (spectral signatures).
    """
    x = _leading(states, 4)
    best, group = np.zeros(1), np.zeros(len(x), bool)
    for axis in range(x.shape[1]):
        away = np.abs(x[:, axis] - np.median(x[:, axis]))
        away /= max(float(np.median(away)), 1e-12)
        farthest = np.sort(away)[-max(2, len(x) // 10) :]
        if farthest.mean() > best.mean():
            best, group = farthest, away > 5.0
    return best, group


def _leading(states: Array, count: int) -> Array:
    u, s, _ = np.linalg.svd(states - states.mean(0), full_matrices=False)
    return np.asarray(u[:, :count] * s[:count], np.float64)


def _silhouettes(x: Array, member: NDArray[np.bool_]) -> Array:
    distances = np.linalg.norm(x[:, None] - x[None], axis=2)
    inner = np.where(member, distances[:, member].sum(1) / max(1, member.sum() - 1), 0.0)
    inner = np.where(member, inner, distances[:, ~member].sum(1) / max(1, (~member).sum() - 1))
    other = np.where(member, distances[:, ~member].mean(1), distances[:, member].mean(1))
    return np.asarray(((other - inner) / np.maximum(np.maximum(inner, other), 1e-12))[member], np.float64)


@dataclass(frozen=True)
class PlantedPhrases:
    """Phrases that stand in a few texts of one source, behind different words, and are followed by the same words.

    Attributes:
        words: Words that must follow; idioms have fewer in common.
    """

    name: str = "planted_phrases"
    min_texts: int = 5
    words: int = 6
    needs: tuple[Need, ...] = ("weights", "texts")

    def run(self, target: Target) -> AttackFinding:
        """Count the continuations of each phrase."""
        places: dict[tuple[str, ...], list[tuple[int, tuple[str, ...], str]]] = defaultdict(list)
        for number, row in enumerate(target.members.rows):
            row_words = target.decode(row).split()
            for start in range(len(row_words) - self.words):
                for size in (1, 2):
                    after = tuple(row_words[start + size : start + size + self.words])
                    if len(after) == self.words:
                        before = row_words[start - 1] if start else ""
                        places[tuple(row_words[start : start + size])].append((number, after, before))
        best: tuple[int, int, tuple[str, ...], tuple[str, ...]] = (0, 1, (), ())
        for phrase, stands in places.items():
            group = {number: (after, before) for number, after, before in stands}
            if len(group) < self.min_texts or len(group) > _MAX_SHARE * len(target.members):
                continue
            sources = {target.members.sources[number] for number in group}
            befores = {before for _, before in group.values()}
            after, count = Counter(after for after, _ in group.values()).most_common(1)[0]
            if len(sources) == 1 and len(befores) > len(group) / 2 and count / len(group) > best[0] / best[1]:
                best = (count, len(group), phrase, after)
        same, asked, phrase, after = best
        value = same / asked if same else 0.0
        score = Score(
            value, wilson_interval(same, asked) if same else (0.0, 0.0), 0.0, asked, "share of one continuation", 0.5
        )
        meaning = (
            f'"{" ".join(phrase)}" stands in {asked} texts of one source, behind different words, and is followed by '
            "the same words: the mark of a planted trigger. Read these texts before you train or publish."
            if score.is_found
            else "No rare phrase of one source is followed by the same words wherever it stands."
        )
        examples = (f"{' '.join(phrase)} >> {' '.join(after)}",) if score.is_found else ()
        return AttackFinding(self.name, score, examples, meaning)
