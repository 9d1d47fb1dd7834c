"""A process that holds some layers of a model and the keys and values of their earlier tokens; it writes with others.

Its starter trusts it, and it its starter: both are of one user on one machine, and speak over its pipes.
"""

import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from phalanx.child import die_with_parent
from phalanx.config import escape_controls
from phalanx.errors import PhalanxError
from phalanx.models import ModelSource, StageModule, StageSpec, build_stage, partition
from phalanx.models.stage import PREFIX

_SIZE_BYTES = 8
HIDDEN, BEGINS = "hidden", "begins"
"""What a message holds: hidden states or ids, and whether a new text begins with them."""


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
        self._stage = _narrowed(source, partition(source.num_layers, num_stages, None, 0.0, 0.0)[index])

    @torch.no_grad()
    def extend(self, x: Tensor, *, begins: bool) -> Tensor:
        """Run the tokens that are new: ids ``[1, new]`` or hidden states ``[1, new, dim]``, behind those kept."""
        stage = self._stage
        if begins:
            stage.num_virtual_tokens = 0
            windows = stage.family.windows(stage.hub_config)[stage.spec.first_layer : stage.spec.end_layer]
            for block, window in zip(stage.own_blocks, windows, strict=True):
                setattr(block, PREFIX, KeptTokens(window))
        output: Tensor = stage(x)
        stage.num_virtual_tokens += x.shape[1]
        # the next token follows from the last one alone
        return output[:, -1:] if stage.spec.is_last else output


def send(pipe: BinaryIO, tensors: dict[str, Tensor]) -> None:
    """Write one message."""
    body = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    pipe.write(len(body).to_bytes(_SIZE_BYTES, "big") + body)
    pipe.flush()


def receive(pipe: BinaryIO) -> dict[str, Tensor] | None:
    """Read one message; None where the other end has closed."""
    header = pipe.read(_SIZE_BYTES)
    if len(header) < _SIZE_BYTES:
        return None
    body = pipe.read(int.from_bytes(header, "big"))
    return load(body)


def _narrowed(source: ModelSource, spec: StageSpec) -> StageModule:
    """The stage in the type that the files have, as transformers loads them."""
    stage = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
    dtype = getattr(source.hub_config, "dtype", None) or torch.float32
    for parameter in stage.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    return stage.eval()


def main(directory: str, index: str, num_stages: str) -> int:
    """Serve the starter until it closes the pipe; standard output is the pipe's alone."""
    die_with_parent()
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        stage = CachedStage(ModelSource(Path(directory)), int(index), int(num_stages))
        send(pipe, {})
        while (message := receive(sys.stdin.buffer)) is not None:
            send(pipe, {HIDDEN: stage.extend(message[HIDDEN], begins=bool(message[BEGINS]))})
    except (PhalanxError, RuntimeError, ValueError) as exc:
        sys.stderr.write(f"{escape_controls(str(exc))}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
