"""What a low-rank adapter in peft's format adds to the weights of a model, whichever layers it is on."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.models.adapters.peft_files import CONFIG, WEIGHTS
from phalanx.models.family import SCORE_WEIGHT
from phalanx.models.stage import MAGNITUDE

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_WRAPPER = ".base_layer"
"""Ends the name of a module on which peft has put several adapters, each on another of its parameters."""
_EVERYTHING = "all-linear"


@dataclass(frozen=True)
class LowRankUpdate:
    """What an adapter changes in one weight.

    Attributes:
        down: ``[experts * rank, inputs]``.
        up: ``[outputs, rank * experts]``.
        scale: What their product is multiplied by.
        num_experts: Matrices that the weight consists of.
        sizes: Of each output's weights, as DoRA has learned them; None without.
    """

    down: Tensor
    up: Tensor
    scale: float
    num_experts: int = 1
    sizes: Tensor | None = None

    def add_to(self, weight: Tensor, *, is_turned: bool) -> None:
        """Change a weight in place; `is_turned` says that it is stored ``[inputs, outputs]``."""
        if self.num_experts > 1:
            # peft's own order: experts are outermost of the one and innermost of the other
            down = self.down.reshape(self.num_experts, -1, self.down.shape[-1])
            up = self.up.reshape(self.up.shape[0], -1, self.num_experts)
            weight += torch.einsum("o r e, e r i -> e o i", up, down) * self.scale
            return
        update = torch.mm(self.up, self.down) * self.scale
        weight += update.T if is_turned else update
        if self.sizes is not None:
            inputs = 0 if is_turned else 1
            weight *= self.sizes.unsqueeze(inputs) / torch.linalg.norm(weight, dim=inputs, keepdim=True)


def updates_of(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    directory: Path,
    *,
    is_turned: bool,
) -> dict[str, LowRankUpdate]:
    """Return what an adapter changes, by the names of the model's weights.

    Args:
        directory: Where the adapter lies, for messages.
        is_turned: Whether the matrices of blocks are stored ``[inputs, outputs]``.
    """
    _check_patterns(config, directory)
    updates: dict[str, LowRankUpdate] = {}
    used: set[str] = {SCORE_WEIGHT}
    for name in sorted(tensors):
        if not name.endswith(LORA_A):
            continue
        layer = name.removesuffix(LORA_A)
        pair = (name, f"{layer}{LORA_B}", f"{layer}{MAGNITUDE}")
        up = tensors.get(pair[1])
        target = None if up is None else _target_weight(layer, tensors[name], up, shapes, is_turned=is_turned)
        if up is None or target is None:
            raise ModelError(f"{directory / WEIGHTS}: {name}: fits no weight of the model; it is of another model")
        weight, num_experts = target
        scale = _update_scale(config, weight, len(tensors[name]) // num_experts, directory)
        updates[weight] = LowRankUpdate(tensors[name], up, scale, num_experts, tensors.get(pair[2]))
        used.update(pair)
    foreign = sorted(set(tensors) - used)
    if foreign:
        raise ModelError(f"{directory / WEIGHTS}: {foreign[0]}: is no part of a weight; it is of another model or kind")
    _check_complete(set(updates), config, shapes, directory)
    return updates


def _target_weight(
    layer: str, down: Tensor, up: Tensor, shapes: Mapping[str, tuple[int, ...]], *, is_turned: bool
) -> tuple[str, int] | None:
    """Return the weight that a pair is added to and of how many experts it is; None where there is none."""
    product = (len(up), down.shape[-1])
    plain = f"{layer}.weight"
    if plain in shapes:
        fits = shapes[plain] in (product, product[::-1] if is_turned else product) and len(down) == up.shape[-1]
        return (plain, 1) if fits else None
    while layer.endswith(_WRAPPER):
        layer = layer.removesuffix(_WRAPPER)
    joined = [
        name
        for name, shape in shapes.items()
        if name.rpartition(".")[0] == layer and shape[1:] == product and len(down) % shape[0] == 0
    ]
    return (joined[0], shapes[joined[0]][0]) if len(joined) == 1 and len(down) == up.shape[-1] else None


def _update_scale(config: Mapping[str, Any], weight: str, rank: int, directory: Path) -> float:
    """Return what a product is multiplied by: `alpha` and `rank` may differ between layers, by patterns."""
    layer = weight.removesuffix(".weight")
    expected = _by_pattern(config.get("rank_pattern"), layer, config.get("r"))
    alpha = _by_pattern(config.get("alpha_pattern"), layer, config.get("lora_alpha"))
    if expected != rank or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(
            f"{directory / CONFIG}: found rank {expected!r} and alpha {alpha!r} for {layer}; "
            f"{WEIGHTS} has rank {rank}; take config and weights of one adapter"
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _check_patterns(config: Mapping[str, Any], directory: Path) -> None:
    targets = config.get("target_modules") or ()
    try:
        patterns = [*(config.get("rank_pattern") or {}).keys(), *(config.get("alpha_pattern") or {}).keys()]
        for pattern in (*patterns, *((targets,) if isinstance(targets, str) else targets)):
            re.compile(pattern)
    except (re.error, TypeError, AttributeError) as exc:
        raise ModelError(
            f"{directory / CONFIG}: target_modules, rank_pattern or alpha_pattern: names no layers ({exc}); expected "
            "names or regular expressions; save the adapter again"
        ) from exc


def _by_pattern(patterns: Any, layer: str, usual: Any) -> Any:
    """Look a layer up as peft does: a pattern is a regular expression for the end of its name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return usual


def _check_complete(
    weights: set[str], config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], directory: Path
) -> None:
    """Refuse an adapter that lacks a layer which its config names; a file that was cut is not merged in silence."""
    targets = config.get("target_modules")
    if targets == _EVERYTHING or config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        # which layers are meant is not in the names alone
        return
    layers = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
    if isinstance(targets, str):
        meant = {layer for layer in layers if re.fullmatch(targets, layer)}
    else:
        ends = tuple(targets or ())
        meant = {layer for layer in layers if any(layer == end or layer.endswith(f".{end}") for end in ends)}
    missing = sorted(meant - {name.removesuffix(".weight") for name in weights})
    if missing:
        raise ModelError(
            f"{directory / WEIGHTS}: found nothing for {missing[0]}, which {CONFIG} names under target_modules; "
            "fetch or save the adapter again"
        )
