"""Rank processes that are forked, so that torch is imported once."""

import gc
import os
from collections.abc import Callable

from phalanx.child import die_with_parent


def fork_ranks(number: int, be_rank: Callable[[int], None]) -> list[int]:
    """Start rank processes that end with this one; returns their ids."""
    parent = str(os.getpid())
    # what the ranks share is searched by none of them, however often a player asks for it
    gc.collect()
    gc.freeze()
    children = []
    for rank in range(number):
        child = os.fork()
        if child == 0:
            os.environ["PHALANX_PARENT"] = parent
            die_with_parent()
            be_rank(rank)
            os._exit(0)
        children.append(child)
    return children
