"""The telemetry of a run: it shows and records, and never decides."""

from phalanx.telemetry.metrics import MetricsFile, read_metrics
from phalanx.telemetry.parties import PEERS_FILE, PartiesStatus, PartyRow, PartyState, PeersFile
from phalanx.telemetry.phases import PhaseTimer
from phalanx.telemetry.progress import ProgressDisplay, StepReading
from phalanx.telemetry.tensorboard import TensorBoardWriter

__all__ = [
    "PEERS_FILE",
    "MetricsFile",
    "PartiesStatus",
    "PartyRow",
    "PartyState",
    "PeersFile",
    "PhaseTimer",
    "ProgressDisplay",
    "StepReading",
    "TensorBoardWriter",
    "read_metrics",
]
