"""The order of a run's samples: permutations, mixtures, phases and curricula, all computed and none stored."""

from phalanx.data.order.group_order import Scores
from phalanx.data.order.mixture import MOST_SHARES, Mixture
from phalanx.data.order.permutation import permute, sample_indices
from phalanx.data.order.run_order import NO_CURRICULA, Group, RunOrder
from phalanx.data.order.schedule import Curriculum, Phase, PhaseSchedule

__all__ = [
    "MOST_SHARES",
    "NO_CURRICULA",
    "Curriculum",
    "Group",
    "Mixture",
    "Phase",
    "PhaseSchedule",
    "RunOrder",
    "Scores",
    "permute",
    "sample_indices",
]
