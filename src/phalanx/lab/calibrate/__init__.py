"""How far honest computations of one message lie apart, and which tolerance follows from it."""

from phalanx.lab.calibrate.paths import NumericPath
from phalanx.lab.calibrate.session import calibrate
from phalanx.lab.calibrate.tail import Tail, fit_tail

__all__ = ["NumericPath", "Tail", "calibrate", "fit_tail"]
