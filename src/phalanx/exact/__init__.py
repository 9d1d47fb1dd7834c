"""One law of arithmetic whose results depend on no processor, instruction set, thread count, build or device."""

from phalanx.exact.functions import draw_normal, rounded_cosine
from phalanx.exact.law import LAW, ExactArithmetic, Grade, vector_norm

__all__ = ["LAW", "ExactArithmetic", "Grade", "draw_normal", "rounded_cosine", "vector_norm"]
