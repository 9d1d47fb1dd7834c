"""How far honest computations of one message lie apart, and which tolerance follows from it."""

from phalanx.calibrate.paths import NumericPath
from phalanx.calibrate.session import calibrate
from phalanx.calibrate.tail import Tail, fit_tail

__all__ = ["NumericPath", "Tail", "calibrate", "fit_tail"]
