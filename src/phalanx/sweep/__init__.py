"""A search over the values of a run file: trials are ordinary run directories, and their values are the owner's own.

The sweep file is read without torch; what needs it is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.sweep.config import SweepConfig as SweepConfig, load_sweep as load_sweep

if TYPE_CHECKING:
    from phalanx.sweep.processes import ProcessTrials as ProcessTrials
    from phalanx.sweep.search import Sweep as Sweep, SweepResult as SweepResult
    from phalanx.sweep.trial import RunTrials as RunTrials, Trials as Trials


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
