"""How ranks find each other: by a file in a private directory on one machine, else as torchrun says."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from phalanx.errors import ConfigError, PeerLostError
from phalanx.parallel.place import Place

_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_ARRIVAL_S = 300.0
_LOOK_EVERY_S = 0.05
_PATIENCE = timedelta(minutes=30)
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def own_device(name: str, place: Place) -> torch.device:
    """The device of a rank: "cuda" is shared out, one for each rank of a machine."""
    return torch.device(name, place.local_rank) if name == "cuda" else torch.device(name)


@contextlib.contextmanager
def join(place: Place, device: torch.device, digest: str, look: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Be one of the ranks of the default group; gloo on CPU, NCCL on CUDA.

    Args:
        place: This process's.
        device: Where it computes.
        digest: Of the run's config, in hex; it must be the same on all ranks.
        look: Called again and again while others are waited for; raises when one of them will not come.

    Raises:
        ConfigError: Ranks would talk over a network that nobody named, or have other run files.
        PeerLostError: Others did not come.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _interface(place):
        try:
            dist.init_process_group(_BACKENDS[device.type], **_meeting(place, look), timeout=_PATIENCE)
        except RuntimeError as exc:
            raise PeerLostError(
                f"rank {place.rank} of {place.world}: the ranks did not find each other: {exc}"
            ) from exc
        try:
            _compare(digest)
            yield
        finally:
            dist.destroy_process_group()


def _meeting(place: Place, look: Callable[[], None]) -> dict[str, Any]:
    if place.rendezvous is None:
        return {"init_method": "env://"}
    store = dist.FileStore(str(place.rendezvous), place.world)  # type: ignore[attr-defined]
    store.set(_present(place.rank), "here")
    if place.is_lead:
        others = [_present(rank) for rank in range(1, place.world)]
        deadline = time.monotonic() + _ARRIVAL_S
        # torch's own wait would not see that a process has ended
        while others and not store.check(others):
            look()
            if time.monotonic() > deadline:
                raise PeerLostError(f"parallel: not all of {place.world} ranks came within {_ARRIVAL_S:.0f} s")
            time.sleep(_LOOK_EVERY_S)
    return {"store": store, "rank": place.rank, "world_size": place.world}


def _present(rank: int) -> str:
    return f"phalanx/{rank}"


@contextlib.contextmanager
def _interface(place: Place) -> Iterator[None]:
    """Ranks of one machine talk over loopback; others over the interface that their operator names."""
    if _INTERFACE in os.environ:
        yield
        return
    if place.local_world != place.world:
        raise ConfigError(
            f"parallel: {place.world} ranks on several machines, and {_INTERFACE} is not set; whoever can reach these "
            "ports can run code in every rank, so name the interface of a private network"
        )
    os.environ[_INTERFACE] = _LOOPBACK
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def _compare(digest: str) -> None:
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
    first = mine.clone()
    dist.broadcast(first, src=0)
    differs = torch.tensor([int(not torch.equal(mine, first))])
    dist.all_reduce(differs)
    if int(differs):
        raise ConfigError(f"parallel: {int(differs)} of the ranks have another run file than rank 0; give all the same")
