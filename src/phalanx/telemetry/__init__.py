"""What a run shows and records about itself; observes, never decides."""

from phalanx.telemetry.metrics import MetricsFile, read_metrics
from phalanx.telemetry.phases import PhaseTimer
from phalanx.telemetry.progress import Progress, Reading
from phalanx.telemetry.tensorboard import TensorBoardWriter

__all__ = ["MetricsFile", "PhaseTimer", "Progress", "Reading", "TensorBoardWriter", "read_metrics"]
