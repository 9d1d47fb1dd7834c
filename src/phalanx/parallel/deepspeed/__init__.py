"""DeepSpeed's ZeRO as what joins data parallel copies, with parameters and optimizer in host memory or on disk.

The config and its checks are there at once; what needs torch is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.parallel.deepspeed.config import AioConfig, DeepSpeedConfig
from phalanx.parallel.deepspeed.refusal import check_machine

if TYPE_CHECKING:
    from phalanx.parallel.deepspeed.member import DeepSpeedMember, opened_member

__all__ = ["AioConfig", "DeepSpeedConfig", "DeepSpeedMember", "check_machine", "opened_member"]

_HOMES = {"DeepSpeedMember": "member", "opened_member": "member"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx.parallel.deepspeed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"phalanx.parallel.deepspeed.{_HOMES[name]}"), name)
