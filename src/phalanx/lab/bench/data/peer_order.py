"""A program for the peers' environment: stop and go on in the middle of an epoch with datasets and torchdata.

It reads scenes as a line of JSON, ``[{"rows": 1000, "before": 2, "after": 3, "steps": 50, "batch": 4}, ...]``, and
writes each peer's lost and repeated samples as one. It is run by a Python that has the peers, and imports nothing of
this package.
"""

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import datasets
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

Scene = dict[str, int]
Reader = Callable[[Scene, int, int, Any], tuple[Iterator[list[int]], Callable[[], Any]]]
_BUFFER, _SHARDS, _SEED = 50, 6, 7


def with_datasets(scene: Scene, world: int, rank: int, state: Any) -> tuple[Iterator[list[int]], Callable[[], Any]]:
    """Read shuffled rows of one rank as datasets' documentation has it: a stream of shards with a shuffle buffer."""
    table = datasets.Dataset.from_dict({"row": list(range(scene["rows"]))}).to_iterable_dataset(num_shards=_SHARDS)
    stream = split_dataset_by_node(table.shuffle(seed=_SEED, buffer_size=_BUFFER), rank=rank, world_size=world)
    if state is not None:
        stream.load_state_dict(state)
    batches = (batch["row"] for batch in stream.iter(batch_size=scene["batch"]))
    return batches, lambda: copy.deepcopy(stream.state_dict())


def with_torchdata(scene: Scene, world: int, rank: int, state: Any) -> tuple[Iterator[list[int]], Callable[[], Any]]:
    """Read shuffled rows of one rank by a stateful loader and sampler."""
    rows = list(range(scene["rows"]))
    sampler = StatefulDistributedSampler(rows, num_replicas=world, rank=rank, shuffle=True, seed=_SEED)
    loader = StatefulDataLoader(rows, batch_size=scene["batch"], sampler=sampler, num_workers=0)
    if state is not None:
        loader.load_state_dict(state)
    return (batch.tolist() for batch in loader), lambda: copy.deepcopy(loader.state_dict())


PEERS: dict[str, Reader] = {"datasets": with_datasets, "torchdata": with_torchdata}


def play_scene(reader: Reader, scene: Scene) -> dict[str, Any]:
    """Read some steps on every rank, keep each rank's state, and read the rest of the epoch on other ranks.

    A rank that has no state of its own begins at the beginning, as a new rank of these loaders does.
    """
    seen: Counter[int] = Counter()
    states = []
    for rank in range(scene["before"]):
        batches, state = reader(scene, scene["before"], rank, None)
        for _, batch in zip(range(scene["steps"]), batches, strict=False):
            seen.update(batch)
        states.append(state())
    try:
        for rank in range(scene["after"]):
            saved_state = states[rank] if rank < len(states) else None
            batches, _ = reader(scene, scene["after"], rank, saved_state)
            for batch in batches:
                seen.update(batch)
    except Exception as exc:  # noqa: BLE001 - whatever a peer raises is its refusal
        return {"lost": None, "repeated": None, "refused": f"{type(exc).__name__}: {exc}"[:200]}
    return {
        "lost": sum(row not in seen for row in range(scene["rows"])),
        "repeated": sum(seen.values()) - len(seen),
        "refused": None,
    }


def main() -> None:
    """Play all scenes with all peers."""
    scenes = json.loads(sys.stdin.readline())
    results = {
        f"{name} {version(name)}": [play_scene(reader, scene) for scene in scenes] for name, reader in PEERS.items()
    }
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
