"""Red team against privacy: what crosses a split is turned back into tokens and labels.

Each attack has a file: its inputs, its gains and its authors. `PRIVACY_ATTACKS` lists them, `WIRES` is the host's view
under each guard, made by the guard's own code.
"""

from phalanx.redteam.inversion.candidate_search import CandidateSearch
from phalanx.redteam.inversion.front import Front, layer_inputs
from phalanx.redteam.inversion.inverter import Inverter, chance_share, recover_tokens, share_of_tokens
from phalanx.redteam.inversion.label_leakage import LabelsByDirection, labels_of_logit_gradients
from phalanx.redteam.inversion.linear_map import LinearMap
from phalanx.redteam.inversion.nearest_neighbour import NearestNeighbour, candidate_states, opening_states
from phalanx.redteam.inversion.span_check import SpanCheck, precision_and_recall
from phalanx.redteam.inversion.table import PRIVACY_ATTACKS
from phalanx.redteam.inversion.trained_inverter import TrainedInverter
from phalanx.redteam.inversion.wires import WIRES, CutWire, Guard

__all__ = [
    "PRIVACY_ATTACKS",
    "WIRES",
    "CandidateSearch",
    "CutWire",
    "Front",
    "Guard",
    "Inverter",
    "LabelsByDirection",
    "LinearMap",
    "NearestNeighbour",
    "SpanCheck",
    "TrainedInverter",
    "candidate_states",
    "chance_share",
    "labels_of_logit_gradients",
    "layer_inputs",
    "opening_states",
    "precision_and_recall",
    "recover_tokens",
    "share_of_tokens",
]
