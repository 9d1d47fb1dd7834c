"""Count lost and repeated samples when a run stops in an epoch and continues with other ranks: ours and the peers'."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data import BatchLoader, Corpus, SequenceLayout
from phalanx.data.corpus import CorpusFacts, TokenGroup
from phalanx.data.packing import TokenSplit
from phalanx.lab.bench.data.peer import PeerProgram

ROWS = 1000
SCENES: tuple[dict[str, int], ...] = (
    {"rows": ROWS, "before": 1, "after": 1, "steps": 100, "batch": 4},
    {"rows": ROWS, "before": 2, "after": 2, "steps": 50, "batch": 4},
    {"rows": ROWS, "before": 2, "after": 3, "steps": 50, "batch": 4},
    {"rows": ROWS, "before": 3, "after": 1, "steps": 30, "batch": 4},
)
"""Ranks before and after the stop, steps until it, rows of a rank's step; then the epoch is read to its end."""


def measure_order(python: str | None) -> dict[str, Any]:
    """Play each scene with our loader, and with the peers' where there are any.

    Args:
        python: Python of an environment with datasets and torchdata; None leaves their figures out.

    Returns:
        Samples lost and repeated over all scenes and by scene; of each peer, under ``peers``, the same. A scene that a
        peer refuses has null.

    Raises:
        DataError: The peers' program failed.
    """
    scenes = [_play_scene(scene) for scene in SCENES]
    peers = {} if python is None else _peer_scenes(python)
    return {
        "rows": ROWS,
        "scenes": [dict(scene) for scene in SCENES],
        **_sum_scenes(scenes),
        "peers": {name: _sum_scenes(results) for name, results in peers.items()},
    }


def _sum_scenes(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum what scenes came to; a scene that was refused counts for nothing and is told."""
    return {
        "lost": sum(scene["lost"] or 0 for scene in found),
        "repeated": sum(scene["repeated"] or 0 for scene in found),
        "refused": sum(scene["refused"] is not None for scene in found),
        "by_scene": found,
    }


def _play_scene(scene: dict[str, int]) -> dict[str, Any]:
    """Stop a loader, write its state as JSON, and go on with another world."""
    corpus, seen = _scene_corpus(scene["rows"]), Counter[int]()
    loader = BatchLoader(corpus, scene["before"] * scene["batch"], seed=7)
    for _ in range(scene["steps"]):
        seen.update(loader.next_batch().indices)
    state = json.loads(json.dumps(loader.position_state()))
    loader = BatchLoader(corpus, scene["after"] * scene["batch"], seed=7)
    loader.load_position(state)
    # an epoch goes over into the next one, which is not counted
    num_remaining = scene["rows"] - seen.total()
    while num_remaining:
        taken = loader.next_batch().indices[:num_remaining]
        seen.update(taken)
        num_remaining -= len(taken)
    return {
        "lost": sum(row not in seen for row in range(scene["rows"])),
        "repeated": seen.total() - len(seen),
        "refused": None,
    }


def _scene_corpus(rows: int) -> Corpus:
    tokens = np.arange(1, 2 * rows + 2, dtype=np.uint32)
    split = TokenSplit(tokens, 0, lambda: np.array([0, len(tokens)]), lambda _: np.zeros(1))
    facts = CorpusFacts("0" * 64, len(tokens) + 1, 0, Path("tokenizer.json"))
    return Corpus(facts, [TokenGroup("", "0" * 64, split, split)], SequenceLayout(2))


def _peer_scenes(python: str) -> dict[str, list[dict[str, Any]]]:
    with PeerProgram(python, "peer_order.py", "datasets and torchdata") as peer:
        results: dict[str, list[dict[str, Any]]] = peer.ask(SCENES)
    return results
