"""Cut a stage so that tensor parallel ranks share its matrices; every parameter stays an ordinary tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.models import StageModule
from phalanx.models.stage import MAGNITUDE, PREFIX
from phalanx.parallel.groups.collectives import Group, copy_to_ranks, gather_parts, scatter_sum, sum_over_ranks
from phalanx.parallel.tensor.tensor_plans import BlockPlan, plan_of


class RowLinear(nn.Module):
    """A linear layer with inputs that are spread over ranks; its output is the sum of their products.

    Args:
        bias: The whole one, or None; added once, after the sum.
        is_transposed: The weight is stored ``[in, out]``.
        cuts_sequence: Each rank keeps its slice of the sequence of the sum.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: Group,
        *,
        is_transposed: bool,
        cuts_sequence: bool,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._group = group
        self._is_transposed = is_transposed
        self._cuts_sequence = cuts_sequence

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in / ranks]`` to ``[..., out]``, of which the sequence may be cut."""
        product = x @ self.weight if self._is_transposed else functional.linear(x, self.weight)
        total = (
            scatter_sum(product, x.dim() - 2, self._group)
            if self._cuts_sequence
            else sum_over_ranks(product, self._group)
        )
        return total if self.bias is None else total + self.bias


class RowEmbedding(nn.Module):
    """An embedding of which each rank has some rows; the rows that others have come from them.

    Args:
        padding_idx: Row of the whole table that gets no gradient from here, or None.
    """

    def __init__(self, weight: nn.Parameter, group: Group, padding_idx: int | None) -> None:
        super().__init__()
        self.weight = weight
        self._group = group
        self._start = group.rank() * weight.shape[0]
        local = None if padding_idx is None else padding_idx - self._start
        self._padding_idx = local if local is not None and 0 <= local < weight.shape[0] else None

    def forward(self, ids: Tensor) -> Tensor:
        """Look ids up, ``[batch, seq]`` to ``[batch, seq, width]``."""
        local = ids - self._start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.weight, self._padding_idx)
        return sum_over_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)


Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def entry_hook(group: Group, *, cuts_sequence: bool) -> Hook:
    """Return a function for a module's first input, which prepares it before ranks share the module's work."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        # without the batch: some families flatten batch and sequence before their MLP
        x = gather_parts(x, x.dim() - 2, group) if cuts_sequence else copy_to_ranks(x, group)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    return hook


def expert_hook(group: Group, num_experts: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Tensor, ...]]:
    """Return a function for the inputs of experts, which leaves a rank the choices that are of its own.

    The others get the number behind the last expert, for which transformers computes nothing, and no weight.

    Args:
        num_experts: Number of experts that each rank has, the same for all.
    """

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        hidden, chosen, weights = inputs
        own = chosen - group.rank() * num_experts
        is_elsewhere = (own < 0) | (own >= num_experts)
        weights = copy_to_ranks(weights, group).masked_fill(is_elsewhere, 0.0)
        return copy_to_ranks(hidden, group), own.masked_fill(is_elsewhere, num_experts), weights

    return hook


def local_parameter(values: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter of its own memory that is trained as another one is."""
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format), requires_grad=like.requires_grad)


@dataclass(frozen=True)
class Split:
    """A parameter that is cut along one dimension.

    Attributes:
        parts: Matrices that lie side by side in it, such as query, key and value; each is cut by itself.
    """

    dim: int
    parts: int = 1

    def take_slice(self, whole: Tensor, index: int, count: int) -> Tensor:
        """Return slice `index` of `count`, in memory of its own."""
        pieces = [part.chunk(count, self.dim)[index] for part in whole.chunk(self.parts, self.dim)]
        return torch.cat(pieces, self.dim)

    def join_slices(self, slices: Sequence[Tensor]) -> Tensor:
        """Return the whole that `take` cut; slices in the order of ranks."""
        cut = [piece.chunk(self.parts, self.dim) for piece in slices]
        return torch.cat([piece[part] for part in range(self.parts) for piece in cut], self.dim)


_HEAD = "lm_head"
_HEAD_NORMS = ("q_norm", "k_norm")
_ADAPTED = "base_layer"
"""Name of the wrapped layer inside an adapter's layer."""


@dataclass
class TensorCut:
    """The result of cutting a stage.

    Attributes:
        splits: Place of each cut parameter in the whole one, by name.
        partial: Names of parameters that every rank has whole, with a part of the sum of their gradient.
        shares_vocabulary: Embedding and head are cut along the vocabulary.
    """

    splits: dict[str, Split] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    shares_vocabulary: bool = False


def cut_stage(stage: StageModule, group: Group, *, cuts_sequence: bool) -> TensorCut:
    """Give a stage this rank's slices.

    Embedding and head are cut too where the ranks divide the vocabulary; otherwise all ranks do that work.

    Args:
        stage: Stage with whole parameters; changed in place.
        group: The tensor parallel ranks; one alone changes nothing.
        cuts_sequence: Between the shared layers each rank has a slice of the sequence.
    """
    cut = TensorCut()
    if group.size() == 1:
        return cut
    knife = _StageCutter(stage, group, cut, cuts_sequence)
    for block, name in zip(stage.own_blocks, _block_names(stage), strict=True):
        knife.cut_block(block, name, plan_of(stage.family.model_type))
    cut.shares_vocabulary = int(stage.hub_config.vocab_size) % group.size() == 0
    if cut.shares_vocabulary:
        knife.cut_vocabulary()
    return cut


def _block_names(stage: StageModule) -> list[str]:
    prefix = f"{stage.family.trunk}.{stage.family.blocks}"
    return [f"{prefix}.{layer}" for layer in range(stage.spec.first_layer, stage.spec.end_layer)]


class _StageCutter:
    """A cutter of modules in place, which notes how they were cut."""

    def __init__(self, stage: StageModule, group: Group, cut: TensorCut, cuts_sequence: bool) -> None:
        self._stage = stage
        self._group = group
        self._cut = cut
        self._cuts_sequence = cuts_sequence

    def cut_block(self, block: nn.Module, name: str, plan: BlockPlan) -> None:
        # Conv1D stores [in, out]
        out = 1 if self._stage.family.fan_in_fan_out else 0
        for path, parts in plan.columns.items():
            self._cut_columns(block.get_submodule(path), f"{name}.{path}", out, parts)
        for path in plan.rows:
            self._cut_rows(block, path, f"{name}.{path}", 1 - out)
        for path in plan.entries:
            hook = entry_hook(self._group, cuts_sequence=self._cuts_sequence)
            block.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
        if hasattr(block, PREFIX):
            self._cut_prefix(block.get_submodule(PREFIX), name)
        if plan.experts is not None:
            self._cut_experts(block.get_submodule(plan.experts), f"{name}.{plan.experts}")
        attention: Any = block.get_submodule(plan.attention)
        # norms of each head: a rank's heads alone say what their gradient is
        self._cut.partial.update(
            f"{name}.{plan.attention}.{norm}.weight" for norm in _HEAD_NORMS if hasattr(attention, norm)
        )
        for attribute in plan.per_head:
            setattr(attention, attribute, getattr(attention, attribute) // self._group.size())

    def _cut_experts(self, experts: Any, name: str) -> None:
        """Give each rank some of the experts, whole; all ranks see all tokens and add up what their experts say."""
        for piece in ("gate_up_proj", "down_proj"):
            setattr(experts, piece, self._slice_parameter(getattr(experts, piece), f"{name}.{piece}", Split(0)))
        experts.num_experts //= self._group.size()
        # transformers' own mark: choices behind the last expert are left out
        experts._is_expert_parallel = True
        experts.register_forward_pre_hook(expert_hook(self._group, experts.num_experts))
        group = self._group
        experts.register_forward_hook(lambda module, inputs, output: sum_over_ranks(output, group))

    def cut_vocabulary(self) -> None:
        """Cut embedding and head; where they are one parameter they stay one."""
        stage = self._stage
        weights: dict[int, nn.Parameter] = {}
        if stage.spec.is_first:
            path = stage.family.embedding_weight.removesuffix(".weight")
            table: Any = stage.get_submodule(path)
            weights[id(table.weight)] = weight = self._slice_parameter(table.weight, f"{path}.weight", Split(0))
            parent, _, leaf = path.rpartition(".")
            setattr(stage.get_submodule(parent), leaf, RowEmbedding(weight, self._group, table.padding_idx))
        if stage.spec.is_last:
            head: Any = stage.get_submodule(_HEAD)
            shared_weight = weights.get(id(head.weight))
            head.weight = (
                shared_weight
                if shared_weight is not None
                else self._slice_parameter(head.weight, f"{_HEAD}.weight", Split(0))
            )

    def _cut_columns(self, layer: Any, name: str, dim: int, parts: int) -> None:
        linear = getattr(layer, _ADAPTED, layer)
        if linear is not layer:
            self._cut_adapter(layer, name, parts)
        linear.weight = self._slice_parameter(linear.weight, f"{name}.weight", Split(dim, parts))
        if linear.bias is not None:
            linear.bias = self._slice_parameter(linear.bias, f"{name}.bias", Split(0, parts))
        if hasattr(linear, "nf"):
            linear.nf = linear.weight.shape[dim]

    def _cut_adapter(self, layer: Any, name: str, parts: int) -> None:
        """Of what an adapter adds each rank has the columns that it has of the layer itself."""
        for adapter in layer.lora_B.values():
            adapter.weight = self._slice_parameter(adapter.weight, f"{name}.lora_B.weight", Split(0, parts))
        # a rank's columns alone say what its gradient is
        self._cut.partial.add(f"{name}.lora_A.weight")
        for size in layer.lora_magnitude_vector.values():
            size.weight = self._slice_parameter(size.weight, f"{name}{MAGNITUDE}", Split(0, parts))

    def _cut_prefix(self, prefix: Any, name: str) -> None:
        """Of virtual tokens each rank has the heads that it has of all others."""
        for part in ("key", "value"):
            setattr(prefix, part, self._slice_parameter(getattr(prefix, part), f"{name}.{PREFIX}.{part}", Split(0)))

    def _cut_rows(self, block: nn.Module, path: str, name: str, dim: int) -> None:
        linear: Any = block.get_submodule(path)
        rows = RowLinear(
            self._slice_parameter(linear.weight, f"{name}.weight", Split(dim)),
            linear.bias,
            self._group,
            is_transposed=self._stage.family.fan_in_fan_out,
            cuts_sequence=self._cuts_sequence,
        )
        parent, _, leaf = path.rpartition(".")
        setattr(block.get_submodule(parent), leaf, rows)

    def _slice_parameter(self, whole: nn.Parameter, name: str, split: Split) -> nn.Parameter:
        self._cut.splits[name] = split
        return local_parameter(split.take_slice(whole.detach(), self._group.rank(), self._group.size()), whole)
