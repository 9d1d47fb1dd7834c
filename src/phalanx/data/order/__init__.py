"""The order of a run's samples: permutations, mixtures, phases and curricula, all computed and none stored."""

from phalanx.data.order.group_order import Scores
from phalanx.data.order.permutation import sample_indices
from phalanx.data.order.run_order import NO_CURRICULA, Group, RunOrder
from phalanx.data.order.schedule import Curriculum, Phase

__all__ = [
    "NO_CURRICULA",
    "Curriculum",
    "Group",
    "Phase",
    "RunOrder",
    "Scores",
    "sample_indices",
]
