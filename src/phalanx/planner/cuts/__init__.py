"""The cuts of a model between clients and an enclave, by memory, bandwidth, compute and measured leaks."""

from phalanx.planner.cuts.answer import CutAnswer as CutAnswer, ask_cuts as ask_cuts
from phalanx.planner.cuts.leaks import read_leaks as read_leaks
from phalanx.planner.cuts.parties import Parties as Parties, parties_here as parties_here
from phalanx.planner.cuts.stages import (
    StageLeak as StageLeak,
    StageLeakTable as StageLeakTable,
    read_stage_leaks as read_stage_leaks,
)
