"""One law of arithmetic whose results depend on no processor, instruction set, thread count, build or device."""

from phalanx.exact.functions import draw_normal, rounded_cosine
from phalanx.exact.law import ExactArithmetic, Grade
from phalanx.exact.operators import LAW, compute_norm

__all__ = ["LAW", "ExactArithmetic", "Grade", "compute_norm", "draw_normal", "rounded_cosine"]
