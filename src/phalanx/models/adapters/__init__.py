"""Adapters: trained tensors beside frozen weights, their files, and quantized frozen weights."""

from phalanx.models.adapters.kinds import draw_adapter, inject_adapter, is_adapter

__all__ = ["draw_adapter", "inject_adapter", "is_adapter"]
