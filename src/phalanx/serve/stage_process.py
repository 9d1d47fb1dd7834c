"""A process that holds some layers of a model and the keys and values of their earlier tokens; it writes with others.

Its starter trusts it, and it its starter: both are of one user on one machine, and speak over its pipes.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from phalanx.child import Message, answer_orders, die_with_parent
from phalanx.config import escape_controls
from phalanx.errors import PhalanxError
from phalanx.models import ModelSource, StageModule, StageSpec, build_stage, partition_layers
from phalanx.models.stage import PREFIX

HIDDEN = "hidden"
"""Name of the hidden states or ids in a message."""


class KeptTokens:
    """Keys and values of the earlier tokens of one block, in the place of an adapter's virtual tokens.

    Args:
        window: Tokens that the block sees, the current one included; None where it sees all.
    """

    def __init__(self, window: int | None) -> None:
        self._kept = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Keep and return all so far, ``[batch, heads, tokens, size]`` each; blocks call this."""
        keys_and_values: tuple[Tensor, Tensor] = self._kept.update(keys, values)
        return keys_and_values


class CachedStage:
    """One stage of a model that goes on with one text.

    Raises:
        ModelError: A tensor is missing, or the model has fewer layers than stages.
    """

    def __init__(self, source: ModelSource, index: int, num_stages: int) -> None:
        self._stage = _build_narrow_stage(
            source, partition_layers(source.num_layers, num_stages, None, 0.0, 0.0)[index]
        )

    @torch.no_grad()
    def extend_cache(self, x: Tensor, *, begins: bool) -> Tensor:
        """Run the tokens that are new: ids ``[1, new]`` or hidden states ``[1, new, dim]``, behind those kept."""
        stage = self._stage
        if begins:
            stage.num_virtual_tokens = 0
            windows = stage.family.layer_windows(stage.hub_config)[stage.spec.first_layer : stage.spec.end_layer]
            for block, window in zip(stage.own_blocks, windows, strict=True):
                setattr(block, PREFIX, KeptTokens(window))
        output: Tensor = stage(x)
        stage.num_virtual_tokens += x.shape[1]
        # the next token follows from the last one alone
        return output[:, -1:] if stage.spec.is_last else output


def to_content(x: Tensor) -> bytes:
    """Return hidden states or ids as the content of a message."""
    return save({HIDDEN: x.contiguous()})


def from_content(content: bytes) -> Tensor:
    """Return the hidden states or ids of a message."""
    return load(content)[HIDDEN]


def _build_narrow_stage(source: ModelSource, spec: StageSpec) -> StageModule:
    """The stage in the type that the files have, as transformers loads them."""
    stage = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
    dtype = getattr(source.hub_config, "dtype", None) or torch.float32
    for parameter in stage.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    return stage.eval()


def main(directory: str, index: str, num_stages: str) -> int:
    """Serve the starter until it closes the pipe."""
    die_with_parent()
    try:
        # all stages load at the same time, before they are asked
        with contextlib.redirect_stdout(sys.stderr):
            stage = CachedStage(ModelSource(Path(directory)), int(index), int(num_stages))

        def answer(order: dict[str, Any], content: bytes) -> Iterator[Message]:
            yield {}, to_content(stage.extend_cache(from_content(content), begins=order["begins"])) if content else b""

        answer_orders(answer)
    except (PhalanxError, RuntimeError, ValueError) as exc:
        sys.stderr.write(f"{escape_controls(str(exc))}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
