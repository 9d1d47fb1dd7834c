"""Attention over rows of different lengths in one step: each row's tokens see that row's cache and nothing else."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from phalanx.errors import ModelError
from phalanx.serve.engine.row_cache import RowCache, causal_mask

NAME = "phalanx_rows"


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one text in a step.

    Attributes:
        row: Index of the first one among the step's tokens.
        start: Position of the first one in its text.
        masks: Visible keys by sliding window; filled at the first layer that needs one.
    """

    cache: RowCache
    row: int
    start: int
    length: int
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """Return which keys its tokens see."""
        if window not in self.masks:
            self.masks[window] = causal_mask(self.start, self.length, window)
        return self.masks[window]


class _Step(threading.local):
    segments: Sequence[Segment] = ()


_STEP = _Step()


def run_step(model: Any, ids: Tensor, positions: Tensor, segments: Sequence[Segment], wanted: Tensor) -> Tensor:
    """Run a model over the tokens of several texts.

    Args:
        ids: int64 ``[1, tokens]``; tokens in no segment are padding.
        positions: int64 ``[1, tokens]``.
        wanted: int64 ``[rows]``: tokens whose logits are returned.

    Returns:
        Logits, ``[rows, vocab]``.
    """
    _STEP.segments = segments
    try:
        output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=wanted)
    finally:
        _STEP.segments = ()
    logits: Tensor = output.logits[0]
    return logits


def run_trunk(trunk: Any, hidden: Tensor, positions: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Run a model without embedding and head over hidden states ``[1, tokens, dim]``; return ``[tokens, dim]``."""
    # a check may run inside of a step
    outer, _STEP.segments = _STEP.segments, segments
    try:
        output = trunk(inputs_embeds=hidden, position_ids=positions, use_cache=False)
    finally:
        _STEP.segments = outer
    states: Tensor = output.last_hidden_state[0]
    return states


def segments_of_step() -> Sequence[Segment]:
    """Return the texts' tokens that this thread runs a model over at the moment."""
    return _STEP.segments


def run_states(model: Any, ids: Tensor, positions: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Run a model without its head; return the last hidden states, ``[tokens, dim]``."""
    _STEP.segments = segments
    try:
        output = model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        _STEP.segments = ()
    states: Tensor = output.last_hidden_state[0]
    return states


def attend_rows(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """Attend by rows, as an attention function of transformers; return ``[1, tokens, heads, dim]``."""
    if softcap is not None or s_aux is not None:
        raise ModelError("its attention has a soft cap or sinks, which this engine does not compute")
    segments, num_padding = _STEP.segments, query.shape[2] - sum(segment.length for segment in _STEP.segments)
    if len(segments) == 1 and not num_padding:
        # a lone text needs no views and no copy
        return _attend_segment(module, segments[0], (query[0], key[0], value[0]), scaling, sliding_window)[None], None
    # segments lie behind one another and padding after them: one call makes the views of all texts
    lengths = [*(segment.length for segment in segments), num_padding]
    parts = zip(segments, *(torch.split(tensor[0], lengths, dim=1) for tensor in (query, key, value)), strict=False)
    outputs: list[Tensor] = []
    for segment, queries, new_keys, new_values in parts:
        new = (queries, new_keys, new_values)
        outputs.append(_attend_segment(module, segment, new, scaling, sliding_window))
    if num_padding:
        outputs.append(query.new_zeros(num_padding, query.shape[1], value.shape[3]))
    return torch.cat(outputs)[None], None


def _attend_segment(
    module: Any,
    segment: Segment,
    new: tuple[Tensor, Tensor, Tensor],
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Attend the tokens of one text; return ``[tokens, heads, dim]``.

    Args:
        new: Queries, keys and values of its tokens, ``[heads, tokens, dim]`` each.
    """
    queries, new_keys, new_values = new
    heads, groups = len(queries), len(queries) // len(new_keys)
    keys, values = segment.cache.write_layer(module.layer_idx, segment.start, new_keys, new_values)
    if sliding_window is not None and segment.length == 1:
        keys, values = keys[:, -sliding_window:], values[:, -sliding_window:]
        mask = None
    else:
        mask = segment.mask(sliding_window)
    # heads that share keys stand behind one another as if they were further tokens: nothing is copied
    packed = queries.reshape(1, heads // groups, groups * segment.length, queries.shape[2])
    if mask is not None and groups > 1:
        mask = mask.repeat(groups, 1)
    attended = scaled_dot_product_attention(packed, keys[None], values[None], mask, scale=scaling)
    return attended.view(heads, segment.length, -1).transpose(0, 1)


def adopt_attention(model: Any) -> None:
    """Have a model attend by rows.

    Raises:
        ModelError: Its architecture computes otherwise: the logits of two short texts differ from the model's own.
    """
    ids = torch.tensor([[3, 1, 4, 1, 5]]) % model.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        AttentionInterface.register(NAME, attend_rows)
        try:
            model.set_attn_implementation(NAME)
            actual = _logits_by_rows(model, ids)
        except (TypeError, ValueError, AttributeError, RuntimeError) as exc:
            raise ModelError(f"{type(model).__name__}: this engine cannot run it ({str(exc)[:200]})") from exc
    if not torch.allclose(actual, expected, rtol=1e-3, atol=1e-2 * float(expected.abs().max())):
        raise ModelError(f"{type(model).__name__}: this engine computes other logits than the model itself")


def _logits_by_rows(model: Any, ids: Tensor) -> Tensor:
    """Return the last logits of a text that is read in two pieces beside another one, ``[vocab]``."""
    caches = [RowCache(model.config.num_hidden_layers) for _ in range(2)]
    for cache in caches:
        cache.reserve_room(ids.shape[1])
    other = ids[:, :3]
    first = torch.cat([ids[:, :3], other], dim=1)
    places = torch.tensor([[0, 1, 2, 0, 1, 2]])
    run_step(model, first, places, [Segment(caches[0], 0, 0, 3), Segment(caches[1], 3, 0, 3)], torch.tensor([2]))
    last = run_step(model, ids[:, 3:], torch.tensor([[3, 4]]), [Segment(caches[0], 0, 3, 2)], torch.tensor([1]))
    return last[0].float()
