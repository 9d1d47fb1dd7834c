"""P-tuning v2: trained keys and values of virtual tokens before every layer's own tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ModelError
from phalanx.models.config import PrefixConfig
from phalanx.models.seeding import fill_normal, seeded_generator
from phalanx.models.stage import PREFIX, StageModule

_KEY, _VALUE = f".{PREFIX}.key", f".{PREFIX}.value"
_STANDARD_DEVIATION = 0.02


class Prefix(nn.Module):
    """A trained prefix in the place of a block's cache of keys and values of earlier tokens."""

    def __init__(self, heads: int, tokens: int, size: int) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.empty(heads, tokens, size, device="meta"))
        self.value = nn.Parameter(torch.empty(heads, tokens, size, device="meta"))

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values, ``[batch, heads, tokens + seq, size]`` each; blocks call this."""
        batch = keys.shape[0]
        before = [tensor.to(keys.dtype).expand(batch, -1, -1, -1) for tensor in (self.key, self.value)]
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)


def inject_prefix(stage: StageModule, adapter: PrefixConfig) -> None:
    """Put virtual tokens, on the meta device, before this stage's blocks; freeze the rest.

    Raises:
        ModelError: A layer of the model has a sliding window, from which they would fall.
    """
    if any(stage.family.layer_windows(stage.hub_config)):
        raise ModelError("model.adapter: virtual tokens are not known in layers with a sliding window; take lora")
    stage.requires_grad_(False)
    heads, size = _head_shape(stage.hub_config)
    for block in stage.own_blocks:
        block.add_module(PREFIX, Prefix(heads, adapter.tokens, size))
    stage.num_virtual_tokens = adapter.tokens


def is_prefix(name: str) -> bool:
    """True for the canonical name of a virtual token's keys or values."""
    return name.endswith((_KEY, _VALUE))


def draw_prefix(name: str, values: Tensor, seed: int) -> None:
    """Fill keys or values from a normal distribution that depends on seed and canonical name alone."""
    fill_normal(values, _STANDARD_DEVIATION, seeded_generator(seed, name))


def _head_shape(hub_config: Any) -> tuple[int, int]:
    heads = int(hub_config.num_attention_heads)
    size = getattr(hub_config, "head_dim", None) or hub_config.hidden_size // heads
    return int(getattr(hub_config, "num_key_value_heads", None) or heads), int(size)
