"""The table of attacks on federated updates: what a lying site sends, and which layer must stop it."""

from collections.abc import Callable, Mapping
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
        own: What it would send if it only trained, on clean or on poisoned data.
        own_before: What it sent in the round before; zero in the first.
        moved_before: How the shared weights moved in the round before; zero in the first.
        chance: For attacks that draw.
    """

    honest: Tensor
    own: Tensor
    own_before: Tensor
    moved_before: Tensor
    chance: torch.Generator


Lie = Callable[[AttackerView], Tensor]


@dataclass(frozen=True)
class UpdateLine:
    """One line of the table.

    Attributes:
        lie: What is sent.
        poisons: What of the attacker's own data is altered before it trains.
        stopped_by: The first layer that must stop it: the door, or a robust rule.
        source: Where it was described first.
    """

    lie: Lie
    poisons: Literal["labels", "trigger"] | None
    stopped_by: Literal["admission", "rule"]
    source: str


def _honest(view: AttackerView) -> Tensor:
    return view.own


def _sign_flip(view: AttackerView) -> Tensor:
    return -view.own


def _inner_product(view: AttackerView) -> Tensor:
    return -5 * view.honest.mean(0)


def _a_little(view: AttackerView) -> Tensor:
    return view.honest.mean(0) - 1.5 * view.honest.std(0)


def _mimic(view: AttackerView) -> Tensor:
    # not bit by bit: copies are refused at the door
    return view.honest[0] * (1 + 1e-4)


def _scaled(view: AttackerView) -> Tensor:
    return -20 * view.own


def _gaussian(view: AttackerView) -> Tensor:
    draw = torch.randn(view.own.shape, generator=view.chance)
    return draw * float(view.honest.norm(dim=1).mean() / draw.norm())


def _replay(view: AttackerView) -> Tensor:
    return view.own_before


def _free_ride(view: AttackerView) -> Tensor:
    return torch.zeros_like(view.own)


def _hidden_free_ride(view: AttackerView) -> Tensor:
    noise = torch.randn(view.own.shape, generator=view.chance)
    return view.moved_before + 0.1 * float(view.moved_before.norm() / noise.norm()) * noise


def _not_a_number(view: AttackerView) -> Tensor:
    return view.own * float("nan")


def _boosted(view: AttackerView) -> Tensor:
    return 5 * view.own


UPDATE_ATTACKS: Mapping[str, UpdateLine] = MappingProxyType(
    {
        "label_flip": UpdateLine(_honest, "labels", "rule", "Biggio et al. 2012"),
        "sign_flip": UpdateLine(_sign_flip, None, "rule", "Li et al. 2019"),
        "inner_product": UpdateLine(_inner_product, None, "rule", "Xie et al. 2020 (IPM)"),
        "a_little": UpdateLine(_a_little, None, "rule", "Baruch et al. 2019 (ALIE)"),
        "mimic": UpdateLine(_mimic, None, "rule", "Karimireddy et al. 2022"),
        "scaling": UpdateLine(_scaled, None, "admission", "Blanchard et al. 2017"),
        "gaussian": UpdateLine(_gaussian, None, "rule", "Blanchard et al. 2017"),
        "not_a_number": UpdateLine(_not_a_number, None, "admission", "McMahan et al. 2017, without a check"),
        "backdoor": UpdateLine(_boosted, "trigger", "rule", "Bagdasaryan et al. 2020"),
        "replay": UpdateLine(_replay, None, "admission", "Fraboni et al. 2021"),
        "free_rider": UpdateLine(_free_ride, None, "admission", "Fraboni et al. 2021"),
        "hidden_free_rider": UpdateLine(_hidden_free_ride, None, "rule", "Fraboni et al. 2021"),
        "sybil": UpdateLine(_inner_product, None, "admission", "Douceur 2002; Fung et al. 2020"),
    }
)
"""A Sybil sends what it likes under names that it makes up: nothing but the roster stops it."""
