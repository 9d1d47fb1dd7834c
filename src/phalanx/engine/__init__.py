"""The inputs and results of every engine: the floor that pipeline, domain and split stand on."""

from phalanx.engine.step import NO_EXTRAS, UNGUARDED, Engine, GuardReport, StepInputs, StepResult
from phalanx.engine.verdict import Offence, Verdict

__all__ = ["NO_EXTRAS", "UNGUARDED", "Engine", "GuardReport", "Offence", "StepInputs", "StepResult", "Verdict"]
