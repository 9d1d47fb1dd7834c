"""The speed of this machine, measured for a moment, for people: nothing is decided by it."""

import time
from collections.abc import Callable

import torch

_WIDTH = 512
_LONGEST_S = 0.5


def own_gflops(device: str = "cpu", clock: Callable[[], float] = time.perf_counter) -> int:
    """Return how many billions of operations a second this machine does, on the product that most of a stage is.

    Measured with the threads that are set, for half a second, the first product left out.
    """
    x = torch.rand(_WIDTH, _WIDTH, device=device)
    x @ x
    started, products = clock(), 0
    while clock() - started < _LONGEST_S:
        # to read one number waits for an accelerator
        float((x @ x)[0, 0])
        products += 1
    return round(products * 2 * _WIDTH**3 / (clock() - started) / 1e9)
