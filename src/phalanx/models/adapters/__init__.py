"""Adapters: what is trained beside frozen weights, their files, and frozen weights in few bits."""

from phalanx.models.adapters.kinds import draw_adapter, inject_adapter, is_adapter

__all__ = ["draw_adapter", "inject_adapter", "is_adapter"]
