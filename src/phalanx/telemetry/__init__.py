"""The telemetry of a run: it shows and records, and never decides."""

from phalanx.telemetry.fitted_table import FittedTable as FittedTable
from phalanx.telemetry.histogram import Histogram as Histogram
from phalanx.telemetry.metrics import MetricsFile as MetricsFile, read_metrics as read_metrics
from phalanx.telemetry.missing import MissingNotice as MissingNotice
from phalanx.telemetry.parties import (
    PEERS_FILE as PEERS_FILE,
    STACKS_FILE as STACKS_FILE,
    PartyRow as PartyRow,
    PeersFile as PeersFile,
)
from phalanx.telemetry.phases import BUSY as BUSY, WALL as WALL, PhaseTimer as PhaseTimer, known_cost as known_cost
from phalanx.telemetry.progress import (
    ProgressDisplay as ProgressDisplay,
    RowsTold as RowsTold,
    ShownProgress as ShownProgress,
    StepReading as StepReading,
    row_bar as row_bar,
)
from phalanx.telemetry.tensorboard import TensorBoardWriter as TensorBoardWriter
from phalanx.telemetry.tracking import CurveWriter as CurveWriter, open_tracking as open_tracking
