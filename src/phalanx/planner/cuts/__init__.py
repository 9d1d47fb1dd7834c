"""The cuts of a model between clients and an enclave, by memory, bandwidth, compute and measured leaks."""

from phalanx.planner.cuts.answer import CutAnswer, ask_cuts
from phalanx.planner.cuts.leaks import read_leaks
from phalanx.planner.cuts.parties import Parties, parties_here

__all__ = [
    "CutAnswer",
    "Parties",
    "ask_cuts",
    "parties_here",
    "read_leaks",
]
