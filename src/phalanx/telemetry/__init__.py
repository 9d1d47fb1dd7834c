"""The telemetry of a run: it shows and records, and never decides."""

from phalanx.telemetry.fitted_table import FittedTable
from phalanx.telemetry.histogram import Histogram
from phalanx.telemetry.metrics import MetricsFile, read_metrics
from phalanx.telemetry.missing import MissingNotice
from phalanx.telemetry.parties import PEERS_FILE, PartyRow, PeersFile
from phalanx.telemetry.phases import BUSY, PhaseTimer, known_cost
from phalanx.telemetry.progress import ProgressDisplay, RowsTold, ShownProgress, StepReading, row_bar
from phalanx.telemetry.tensorboard import TensorBoardWriter
from phalanx.telemetry.tracking import CurveWriter, open_tracking

__all__ = [
    "BUSY",
    "PEERS_FILE",
    "CurveWriter",
    "FittedTable",
    "Histogram",
    "MetricsFile",
    "MissingNotice",
    "PartyRow",
    "PeersFile",
    "PhaseTimer",
    "ProgressDisplay",
    "RowsTold",
    "ShownProgress",
    "StepReading",
    "TensorBoardWriter",
    "known_cost",
    "open_tracking",
    "read_metrics",
    "row_bar",
]
