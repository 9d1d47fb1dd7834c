"""Adapters: trained tensors beside frozen weights, their files, and quantized frozen weights."""

from phalanx.models.adapters.kinds import (
    draw_adapter as draw_adapter,
    inject_adapter as inject_adapter,
    is_adapter as is_adapter,
)
