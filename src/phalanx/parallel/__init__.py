"""Training inside one trust domain: data, tensor, sequence, context and pipeline parallel ranks on torch.distributed.

The config and its check are there at once; what needs torch is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.elastic import fitted, worlds
from phalanx.parallel.outer_config import OuterConfig
from phalanx.parallel.refusal import Workload, check_layout

if TYPE_CHECKING:
    from phalanx.parallel.keeper import stand_in
    from phalanx.parallel.launch import LocalRanks
    from phalanx.parallel.lead import Lead, follow
    from phalanx.parallel.meeting import join, stand_by
    from phalanx.parallel.member import Member, Outcome, Recipe
    from phalanx.parallel.place import Place, find_place
    from phalanx.parallel.saving import Saving

__all__ = [
    "Lead",
    "LocalRanks",
    "Member",
    "Outcome",
    "OuterConfig",
    "ParallelConfig",
    "Place",
    "Recipe",
    "Saving",
    "Workload",
    "check_layout",
    "find_place",
    "fitted",
    "follow",
    "join",
    "stand_by",
    "stand_in",
    "worlds",
]

_HOMES = {
    "Lead": "lead",
    "LocalRanks": "launch",
    "Member": "member",
    "Outcome": "member",
    "Place": "place",
    "Recipe": "member",
    "Saving": "saving",
    "find_place": "place",
    "follow": "lead",
    "join": "meeting",
    "stand_in": "keeper",
    "stand_by": "meeting",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"phalanx.parallel.{_HOMES[name]}"), name)
