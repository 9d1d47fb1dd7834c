"""One law of arithmetic whose results depend on no processor, instruction set, thread count, build or device."""

from phalanx.exact.functions import draw_normal as draw_normal, rounded_cosine as rounded_cosine
from phalanx.exact.law import ExactArithmetic as ExactArithmetic, Grade as Grade, is_grade as is_grade
from phalanx.exact.operators import LAW as LAW, compute_norm as compute_norm
