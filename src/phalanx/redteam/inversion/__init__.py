"""Red team against privacy: what crosses a split or a pipeline is turned back into tokens, labels and properties.

Each attack has a file: its inputs, its gains and its authors. `WIRES` is the host's view under each guard, made by the
guard's own code.
"""

from phalanx.redteam.inversion.candidate_search import CandidateSearch as CandidateSearch
from phalanx.redteam.inversion.front import Front as Front, layer_inputs as layer_inputs
from phalanx.redteam.inversion.gradient_search import GradientSearch as GradientSearch
from phalanx.redteam.inversion.inverter import (
    Inverter as Inverter,
    chance_share as chance_share,
    recover_tokens as recover_tokens,
    share_of_tokens as share_of_tokens,
)
from phalanx.redteam.inversion.label_leakage import (
    LabelsByDirection as LabelsByDirection,
    labels_of_logit_gradients as labels_of_logit_gradients,
)
from phalanx.redteam.inversion.linear_map import LinearMap as LinearMap
from phalanx.redteam.inversion.nearest_neighbour import (
    NearestNeighbour as NearestNeighbour,
    candidate_states as candidate_states,
    opening_states as opening_states,
)
from phalanx.redteam.inversion.span_check import SpanCheck as SpanCheck, precision_and_recall as precision_and_recall
from phalanx.redteam.inversion.text_property import TextProperty as TextProperty
from phalanx.redteam.inversion.trained_inverter import TrainedInverter as TrainedInverter
from phalanx.redteam.inversion.wires import WIRES as WIRES, Guard as Guard
