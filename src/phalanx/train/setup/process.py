"""Settings of the whole process that a run needs, given back when it ends."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic_kernels(threads: int) -> Iterator[None]:
    """Kernels that give the same bits again; the caller's own settings come back afterwards."""
    memory: Any = torch.utils.deterministic
    old = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # every byte is written before it is read; filling new memory first would only cost time
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(old[0])
        torch.use_deterministic_algorithms(old[1])
        memory.fill_uninitialized_memory = old[2]
