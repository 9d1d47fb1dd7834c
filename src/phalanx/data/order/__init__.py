"""The order of a run's samples: permutations, mixtures, phases and curricula, all computed and none stored."""

from phalanx.data.order.group_order import Scores as Scores
from phalanx.data.order.permutation import sample_indices as sample_indices
from phalanx.data.order.run_order import NO_CURRICULA as NO_CURRICULA, Group as Group, RunOrder as RunOrder
from phalanx.data.order.schedule import Curriculum as Curriculum, Phase as Phase
