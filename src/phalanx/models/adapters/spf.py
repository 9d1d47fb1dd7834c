"""Sparsification parameter fine-tuning: of frozen matrices, the heads and rows that weigh most are trained.

What is trained is the difference from the base weights. It begins with zeros, so that a fresh adapter changes nothing,
and weight decay pulls towards the base.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from phalanx.errors import ModelError
from phalanx.models.config import SpfConfig
from phalanx.models.families import family_of
from phalanx.models.family import Family
from phalanx.models.stage import StageModule

_DELTA = ".spf_delta"


class SparseLinear(nn.Module):
    """A frozen linear layer of which some rows are trained.

    Args:
        base: ``nn.Linear`` or transformers' ``Conv1D``.
        groups: ``[kinds, groups, rows]``, output rows that are trained together; of each kind the heaviest groups are.
    """

    def __init__(self, base: nn.Module, groups: Tensor, share: float) -> None:
        super().__init__()
        self.base_layer = base
        self._groups = groups
        self._chosen = _share_of(groups, share)
        rows = groups.shape[0] * self._chosen * groups.shape[2]
        self.spf_delta = nn.Parameter(torch.empty(rows, _rows_of(base).shape[1], device="meta"))
        self.register_buffer("rows", None, persistent=False)
        self.rows: Tensor | None
        """``[rows]``, which ones; None until the base has its weights."""

    def choose_heaviest(self) -> None:
        """Rank by L1 norm, which needs the base's weights; of equal norms the first one wins."""
        weight = _rows_of(self.base_layer).detach()
        self.rows = _heaviest_rows(weight, self._groups, self._chosen).to(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """As the base, with the trained differences added to its rows."""
        if self.rows is None:
            raise ModelError("model.adapter: the rows of an spf adapter are not chosen yet; load the weights first")
        y: Tensor = self.base_layer(x)
        return y.index_add(-1, self.rows, nn.functional.linear(x, self.spf_delta).to(y.dtype))


def inject_spf(stage: StageModule, adapter: SpfConfig) -> None:
    """Put differences, on the meta device, beside the chosen matrices of this stage's blocks; freeze the rest.

    Raises:
        ModelError: One matrix makes queries and fewer keys and values, which have no rows by head.
    """
    heads, shared = (getattr(stage.hub_config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if len(stage.family.attention_inputs) == 1 and shared not in (None, heads):
        raise ModelError(
            f"model.adapter: spf cannot rank heads of {stage.family.model_type}, whose {heads} query heads share "
            f"{shared} of keys and values in one matrix; take lora"
        )
    stage.requires_grad_(False)
    for block in stage.own_blocks:
        for name in (*stage.family.attention_inputs, *stage.family.feed_forward_inputs):
            parent, _, leaf = name.rpartition(".")
            base = block.get_submodule(name)
            groups = _output_groups(stage.family, stage.hub_config, name, len(_rows_of(base)))
            block.get_submodule(parent).add_module(leaf, SparseLinear(base, groups, adapter.share))


def choose_rows(stage: nn.Module) -> None:
    """Rank the rows of every adapted layer, once the base's weights are there."""
    for module in stage.modules():
        if isinstance(module, SparseLinear):
            module.choose_heaviest()


def is_spf(name: str) -> bool:
    """True for the canonical name of a difference."""
    return name.endswith(_DELTA)


def add_spf(weight: Tensor, name: str, delta: Tensor, hub_config: Any, adapter: SpfConfig) -> Tensor:
    """Return a base weight with a trained difference in it.

    Args:
        weight: Weight as in the model's files.
        name: Full name of the layer.
        delta: ``[rows, in]``.
    """
    family = family_of(hub_config.model_type, "model config")
    matrix = weight.T.contiguous() if family.fan_in_fan_out else weight.clone()
    groups = _output_groups(family, hub_config, name, len(matrix))
    rows = _heaviest_rows(matrix, groups, _share_of(groups, adapter.share))
    if delta.shape != (len(rows), matrix.shape[1]):
        raise ModelError(
            f"{name}: has a difference of shape {list(delta.shape)}, expected {[len(rows), matrix.shape[1]]}"
        )
    matrix[rows] += delta
    return matrix.T.contiguous() if family.fan_in_fan_out else matrix


def _share_of(groups: Tensor, share: float) -> int:
    return math.ceil(share * groups.shape[1])


def _heaviest_rows(weight: Tensor, groups: Tensor, chosen: int) -> Tensor:
    """Of each kind the rows of so many groups, ``[rows]``; added up in float64, in one order on all machines."""
    norms = weight.contiguous().abs().sum(dim=1, dtype=torch.float64).cpu()
    weights = norms[groups].sum(dim=2)
    order = torch.argsort(weights, dim=1, descending=True, stable=True)[:, :chosen].sort(dim=1).values
    return groups[torch.arange(len(groups)).unsqueeze(1), order].flatten()


def _rows_of(base: nn.Module) -> Tensor:
    """The weight as ``[out, in]``."""
    weight = base.get_parameter("weight")
    return weight.T if isinstance(base, Conv1D) else weight


def _output_groups(family: Family, hub_config: Any, name: str, out_features: int) -> Tensor:
    """Output rows by kind and group: a head of q, of k and of v, or a single row of a feed-forward matrix."""
    rows = torch.arange(out_features)
    if name.endswith(family.feed_forward_inputs):
        return rows.view(1, -1, 1)
    heads = int(hub_config.num_attention_heads)
    size = int(getattr(hub_config, "head_dim", None) or hub_config.hidden_size // heads)
    if len(family.attention_inputs) > 1:
        return rows.view(1, -1, size)
    return rows.view(-1, 3, size).transpose(0, 1) if family.facts.heads_first else rows.view(3, -1, size)
