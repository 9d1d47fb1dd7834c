"""The table of attacks on federated updates: the update of a lying site, and the layer that must stop it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttackerView:
    """What a lying site knows: the strongest attacker, which sees all honest updates of the round.

    Attributes:
        honest: ``[honest sites, values]`` of this round.
        own: Update after honest training, on clean or on poisoned data.
        own_before: Update that it sent in the round before; zero in the first.
        moved_before: Movement of the shared weights in the round before; zero in the first.
        harm: Tells how far a lie, sent by all liars of the round, would carry the shared step from the honest mean: the
            attacker knows door and rule. None where it does not.
    """

    honest: Tensor
    own: Tensor
    own_before: Tensor
    moved_before: Tensor
    chance: torch.Generator
    harm: Callable[[Tensor], float] | None = None


Lie = Callable[[AttackerView], Tensor]
_FACTORS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""What attacks that know the rule choose from; small ones slip between honest updates, large ones need no rule."""


@dataclass(frozen=True)
class UpdateAttackEntry:
    """One line of the table.

    Attributes:
        poisons: Part of the attacker's own data that is altered before it trains.
        stopped_by: The first layer that must stop it: the door, or a robust rule.
        source: First description of the attack.
    """

    lie: Lie
    poisons: Literal["labels", "trigger"] | None
    stopped_by: Literal["admission", "rule"]
    source: str


def _honest_update(view: AttackerView) -> Tensor:
    return view.own


def _sign_flip(view: AttackerView) -> Tensor:
    return -view.own


def _make_distinct(view: AttackerView, lie: Tensor) -> Tensor:
    """Make a lie that is not another liar's bit by bit: the door refuses copies."""
    return lie * (1 + 1e-4 * float(torch.rand(1, generator=view.chance)))


def _most_harmful(view: AttackerView, factors: Sequence[float], lie_of: Callable[[float], Tensor]) -> Tensor:
    """Take the factor that harms most; the first one where the attacker cannot know."""
    harm = view.harm
    chosen = factors[0] if harm is None else max(factors, key=lambda one: harm(lie_of(one)))
    return _make_distinct(view, lie_of(chosen))


def _inner_product(view: AttackerView) -> Tensor:
    mean = view.honest.mean(0)
    return _most_harmful(view, (5.0, *_FACTORS), lambda factor: -factor * mean)


def _little_is_enough(view: AttackerView) -> Tensor:
    mean, spread = view.honest.mean(0), view.honest.std(0)
    return _most_harmful(view, (1.5, *_FACTORS), lambda factor: mean - factor * spread)


def _mimic_outlier(view: AttackerView) -> Tensor:
    # the site that is furthest from the others, so that its data count most against theirs
    away = (view.honest - view.honest.mean(0)).norm(dim=1)
    return _make_distinct(view, view.honest[int(away.argmax())])


def _scaled_update(view: AttackerView) -> Tensor:
    return -20 * view.own


def _gaussian_update(view: AttackerView) -> Tensor:
    draw = torch.randn(view.own.shape, generator=view.chance)
    return draw * float(view.honest.norm(dim=1).mean() / draw.norm())


def _replayed_update(view: AttackerView) -> Tensor:
    return view.own_before


def _free_ride(view: AttackerView) -> Tensor:
    return torch.zeros_like(view.own)


def _hidden_free_ride(view: AttackerView) -> Tensor:
    noise = torch.randn(view.own.shape, generator=view.chance)
    return view.moved_before + 0.1 * float(view.moved_before.norm() / noise.norm()) * noise


def _not_a_number(view: AttackerView) -> Tensor:
    return view.own * float("nan")


def _boosted_update(view: AttackerView) -> Tensor:
    return 5 * view.own


UPDATE_ATTACKS: Mapping[str, UpdateAttackEntry] = MappingProxyType(
    {
        "label_flip": UpdateAttackEntry(_honest_update, "labels", "rule", "Biggio et al. 2012"),
        "sign_flip": UpdateAttackEntry(_sign_flip, None, "rule", "Li et al. 2019"),
        "inner_product": UpdateAttackEntry(_inner_product, None, "rule", "Xie et al. 2020 (IPM)"),
        "a_little": UpdateAttackEntry(
            _little_is_enough, None, "rule", "Baruch et al. 2019 (ALIE); Shejwalkar and Houmansadr 2021"
        ),
        "mimic": UpdateAttackEntry(_mimic_outlier, None, "rule", "Karimireddy et al. 2022"),
        "scaling": UpdateAttackEntry(_scaled_update, None, "admission", "Blanchard et al. 2017"),
        "gaussian": UpdateAttackEntry(_gaussian_update, None, "rule", "Blanchard et al. 2017"),
        "not_a_number": UpdateAttackEntry(_not_a_number, None, "admission", "McMahan et al. 2017, without a check"),
        "backdoor": UpdateAttackEntry(_boosted_update, "trigger", "rule", "Bagdasaryan et al. 2020"),
        "quiet_backdoor": UpdateAttackEntry(_honest_update, "trigger", "rule", "Wang et al. 2020, within the norm"),
        "replay": UpdateAttackEntry(_replayed_update, None, "admission", "Fraboni et al. 2021"),
        "free_rider": UpdateAttackEntry(_free_ride, None, "admission", "Fraboni et al. 2021"),
        "hidden_free_rider": UpdateAttackEntry(_hidden_free_ride, None, "rule", "Fraboni et al. 2021"),
        "sybil": UpdateAttackEntry(_inner_product, None, "admission", "Douceur 2002; Fung et al. 2020"),
    }
)
"""A Sybil sends what it likes under names that it makes up: nothing but the roster stops it."""
