"""The calibration of the tolerance: how far honest computations of one message lie apart."""

from phalanx.lab.calibrate.paths import NumericPath
from phalanx.lab.calibrate.session import calibrate

__all__ = ["NumericPath", "calibrate"]
