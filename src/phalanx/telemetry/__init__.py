"""What a run shows and records about itself; observes, never decides."""

from phalanx.telemetry.metrics import MetricsFile, read_metrics
from phalanx.telemetry.phases import PhaseTimer
from phalanx.telemetry.progress import ProgressDisplay, StepReading
from phalanx.telemetry.tensorboard import TensorBoardWriter

__all__ = ["MetricsFile", "PhaseTimer", "ProgressDisplay", "StepReading", "TensorBoardWriter", "read_metrics"]
