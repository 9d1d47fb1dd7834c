"""A fork of the test process, which a test lets end by a signal or at a write."""

import gc
import os
from collections.abc import Callable

from phalanx.child import die_with_parent


def run_in_fork(act: Callable[[], object]) -> int:
    """Run `act` in a fork of this process.

    Returns:
        The fork's exit code: 0 where `act` returned, 1 where it raised, and the negative number of a signal.
    """
    # what earlier tests left in circles is destroyed here: a group of ranks waits for its threads, which no fork has
    gc.collect()
    child = os.fork()
    if child == 0:
        die_with_parent()
        gc.disable()
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
