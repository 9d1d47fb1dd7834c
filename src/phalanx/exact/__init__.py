"""One law of arithmetic whose results depend on no processor, instruction set, thread count, build or device."""

from phalanx.exact.functions import draw_normal

__all__ = ["draw_normal"]
