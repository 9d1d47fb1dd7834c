"""Red team against privacy: what crosses a split is turned back into tokens and labels.

Each attack has a file: its inputs, its gains and its authors. `PRIVACY_ATTACKS` lists them, `WIRES` is the host's view
under each guard, made by the guard's own code.
"""

from phalanx.lab.attacks.privacy.candidate_search import CandidateSearch
from phalanx.lab.attacks.privacy.front import Front, layer_inputs
from phalanx.lab.attacks.privacy.inverter import Inverter, chance_share, recover_tokens, share_of_tokens
from phalanx.lab.attacks.privacy.label_leakage import LabelsByDirection, labels_of_logit_gradients
from phalanx.lab.attacks.privacy.linear_map import LinearMap
from phalanx.lab.attacks.privacy.nearest_neighbour import NearestNeighbour, candidate_states, opening_states
from phalanx.lab.attacks.privacy.span_check import SpanCheck, precision_and_recall
from phalanx.lab.attacks.privacy.table import PRIVACY_ATTACKS
from phalanx.lab.attacks.privacy.trained_inverter import TrainedInverter
from phalanx.lab.attacks.privacy.wires import WIRES, CutWire, Guard

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
