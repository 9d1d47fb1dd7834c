"""The calibration of the tolerance: how far honest computations of one message lie apart."""

from phalanx.lab.calibrate.paths import NumericPath
from phalanx.lab.calibrate.session import calibrate
from phalanx.lab.calibrate.tail import Tail, fit_tail

__all__ = ["NumericPath", "Tail", "calibrate", "fit_tail"]
