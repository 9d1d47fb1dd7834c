"""The frozen front of a public model, which the host has as well, run up to each cut that is of interest."""

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.models import ModelSource, StageModule, StageSpec, build_stage

_TOKENS = 512
"""Tokens that are run at once, about."""


class Front:
    """Embedding and first blocks, which turn tokens into the hidden states that cross a cut.

    Args:
        depths: Cuts: so many blocks lie before each; 0 cuts right after the embedding.

    Raises:
        ModelError: A cut is not below the number of layers, or the model cannot be built.
    """

    def __init__(self, source: ModelSource, depths: Sequence[int]) -> None:
        self.depths = tuple(sorted(set(depths)))
        if not self.depths or not 0 <= self.depths[0] <= self.depths[-1] < source.num_layers:
            raise ModelError(f"cuts {list(depths)}: expected numbers from 0 to {source.num_layers - 1}")
        ends = [depth for depth in self.depths if depth] or [1]
        starts = [0, *ends[:-1]]
        self._source = source
        self.stages = [
            _build_frozen(source, StageSpec(index, len(ends) + 1, start, stop))
            for index, (start, stop) in enumerate(zip(starts, ends, strict=True))
        ]
        self.vocab_size = source.vocab_size

    @property
    def embedding_table(self) -> Tensor:
        """The table of token embeddings, ``[vocab, features]``."""
        first = self.stages[0]
        return first.get_parameter(first.family.embedding_weight).detach()

    def hidden_states(self, ids: Tensor, deepest: int | None = None) -> dict[int, Tensor]:
        """Return the hidden states at every cut.

        Args:
            ids: ``[batch, seq]``.
            deepest: The last cut that is wanted; None runs to the last one.

        Returns:
            By depth, ``[batch, seq, dim]`` each.
        """
        last = self.depths[-1] if deepest is None else deepest
        states: dict[int, list[Tensor]] = {depth: [] for depth in self.depths if depth <= last}
        with torch.inference_mode():
            # about as many tokens at once whatever the length
            for rows in torch.split(ids, max(1, _TOKENS // ids.shape[1])):
                self._run_blocks(rows, last, states)
        return {depth: torch.cat(parts).clone() for depth, parts in states.items()}

    def states_at_depth(self, ids: Tensor, depth: int) -> Tensor:
        """Return the hidden states at one cut, ``[batch, seq, dim]``."""
        return self.hidden_states(ids, depth)[depth]

    def states_of_embeddings(self, embedded: Tensor, depth: int) -> Tensor:
        """Run vectors in the place of token embeddings up to one cut; gradients flow back to them.

        Args:
            embedded: ``[batch, seq, features]``; positions are added as for tokens.
            depth: A cut behind a block.

        Returns:
            ``[batch, seq, dim]``.
        """
        first = self.stages[0]
        table = first.get_submodule(first.family.embedding_weight.rpartition(".")[0])
        hook = table.register_forward_hook(lambda *_: embedded)
        try:
            x: Tensor = torch.zeros(embedded.shape[:2], dtype=torch.int64)
            for stage in self.stages:
                x = stage(x)
                if stage.spec.end_layer == depth:
                    return x
        finally:
            hook.remove()
        raise ModelError(f"cut {depth}: is not one of {list(self.depths)} behind a block")

    def next_tokens(self, ids: Tensor, count: int) -> Tensor:
        """Return the next tokens that the whole public model predicts, likeliest first.

        Args:
            ids: Preceding tokens, ``[seq]``, one token at least.

        Returns:
            ``[count]``.
        """
        with torch.inference_mode():
            x = ids[None]
            for stage in self.stages:
                x = stage(x)
            candidates: Tensor = self._back_stage(x)[0, -1].topk(count).indices.clone()
        return candidates

    @cached_property
    def _back_stage(self) -> StageModule:
        spec = self.stages[-1].spec
        return _build_frozen(
            self._source, StageSpec(spec.num_stages - 1, spec.num_stages, spec.end_layer, self._source.num_layers)
        )

    def _run_blocks(self, ids: Tensor, last: int, found: Mapping[int, list[Tensor]]) -> None:
        first = self.stages[0]
        if 0 in found:
            found[0].append(first.family.embed(first.trunk, ids))
        x = ids
        for stage in self.stages:
            if stage.spec.end_layer > last:
                return
            x = stage(x)
            found[stage.spec.end_layer].append(x)


def _build_frozen(source: ModelSource, spec: StageSpec) -> StageModule:
    stage = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
    return stage.eval()


class _ReachedError(Exception):
    """The layer has its inputs."""


def layer_inputs(stage: StageModule, layer: str, ids: Tensor) -> Tensor:
    """Return the inputs of a linear layer of a stage's first block; the stage runs no further than to that layer.

    Args:
        layer: End of the layer's name, such as ``q_proj``.
        ids: ``[batch, seq]``.

    Returns:
        ``[batch, seq, features]``.
    """
    block = stage.own_blocks[0]
    names = [name for name, _ in block.named_modules() if name == layer or name.endswith(f".{layer}")]
    if not names:
        raise ModelError(f"layer {layer!r}: block {stage.spec.first_layer} has none of that name")
    captured: list[Tensor] = []

    def keep(module: Any, inputs: tuple[Tensor, ...]) -> None:
        captured.append(inputs[0].detach())
        raise _ReachedError

    hook = block.get_submodule(names[0]).register_forward_pre_hook(keep)
    try:
        with torch.inference_mode():
            for rows in torch.split(ids, max(1, _TOKENS // ids.shape[1])):
                with contextlib.suppress(_ReachedError):
                    stage(rows)
    finally:
        hook.remove()
    return torch.cat(captured).clone()
