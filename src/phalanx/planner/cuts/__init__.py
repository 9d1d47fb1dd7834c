"""The cuts of a model between clients and an enclave, by memory, bandwidth, compute and measured leaks."""

from phalanx.planner.cuts.answer import CutAnswer, PricedCut, ask_cuts
from phalanx.planner.cuts.cost import Cost, cost_of
from phalanx.planner.cuts.leaks import Leak, LeakTable, read_leaks
from phalanx.planner.cuts.parties import Parties, PartyMachine, parties_here

__all__ = [
    "Cost",
    "CutAnswer",
    "Leak",
    "LeakTable",
    "Parties",
    "PartyMachine",
    "PricedCut",
    "ask_cuts",
    "cost_of",
    "parties_here",
    "read_leaks",
]
