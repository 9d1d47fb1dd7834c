"""The rendezvous of ranks: by a file in a private directory on one machine, else as torchrun says."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from phalanx.engine import check_device
from phalanx.errors import ConfigError, PeerLostError
from phalanx.parallel.groups.heartbeat import FileHeartbeat, Heartbeat, HeartbeatThreads, StoreHeartbeat
from phalanx.parallel.groups.network import (
    address_of,
    check_private,
    interface_of,
    listen_at,
    own_address,
    resolve_host,
)
from phalanx.parallel.groups.rank_env import RankEnv

_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_ARRIVAL_S = 300.0
_LOOK_EVERY_S = 0.05
_PATIENCE = timedelta(minutes=30)
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_OVER = "phalanx/over"


def own_device(name: str, place: RankEnv) -> torch.device:
    """The device of a rank: "cuda" is shared out, one for each rank of a machine."""
    check_device(f"cuda:{place.local_rank}" if name == "cuda" else name, "train.device")
    return torch.device(name, place.local_rank) if name == "cuda" else torch.device(name)


@contextlib.contextmanager
def join_ranks(
    place: RankEnv,
    device: torch.device,
    digest: str,
    look: Callable[[], None] = lambda: None,
    *,
    silence_s: float | None = None,
    unsafe_public_network: bool = False,
) -> Iterator[None]:
    """Be one of the ranks of the default group; gloo on CPU, NCCL on CUDA.

    Args:
        digest: Digest of the run's config, in hex; it must be the same on all ranks.
        look: Called again and again while others are waited for; raises when one of them will not come.
        silence_s: Seconds after which a rank without a heartbeat is taken for hung; None for never. Where no process
            supervises the ranks, this one then ends with exit code 4, since its waits cannot be cancelled.
        unsafe_public_network: Ranks may talk over an address that is not private.

    Raises:
        ConfigError: Ranks would talk over a network that is not private, or have other run files.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_choose_interfaces(place, unsafe=unsafe_public_network))
        try:
            store = _meet_ranks(place, look)
            dist.init_process_group(
                _BACKENDS[device.type], store=store, rank=place.rank, world_size=place.world, timeout=_PATIENCE
            )
        except RuntimeError as exc:
            raise PeerLostError(
                f"rank {place.rank} of {place.world}: the ranks did not find each other: {exc}"
            ) from exc
        try:
            # the process that keeps local ranks gives the heartbeat of rank 0 as well
            if silence_s is not None and not (place.is_kept and place.is_lead):
                stack.enter_context(_heartbeat_threads(place, silence_s))
            _compare_configs(digest)
            yield
            if place.is_lead:
                # ranks that stand by wait for this word
                store.set(_OVER, "1")
        finally:
            dist.destroy_process_group()


def stand_by(place: RankEnv) -> None:
    """Be a process that the layout has no rank for: wait until the run is over, or until rank 0 is gone.

    Args:
        place: Place, with the number of ranks that train.
    """
    try:
        store = _open_store(place)
        while not store.check([_OVER]):
            time.sleep(1.0)
    except RuntimeError:
        # rank 0 keeps the store: how it ended is for its starter to find out
        return


def _meet_ranks(place: RankEnv, look: Callable[[], None]) -> Any:
    store = _open_store(place)
    if place.rendezvous is None:
        return store
    store.set(_present_key(place.rank), "here")
    if place.is_lead:
        others = [_present_key(rank) for rank in range(1, place.world)]
        deadline = time.monotonic() + _ARRIVAL_S
        # torch's own wait would not see that a process has ended
        while others and not store.check(others):
            look()
            if time.monotonic() > deadline:
                raise PeerLostError(f"parallel: not all of {place.world} ranks came within {_ARRIVAL_S:.0f} s")
            time.sleep(_LOOK_EVERY_S)
    return store


def _open_store(place: RankEnv) -> Any:
    """Open the store of the addresses of ranks; rank 0 keeps it unless torchrun does, at one address of its machine."""
    if place.rendezvous is not None:
        return dist.FileStore(str(place.rendezvous), place.world)  # type: ignore[attr-defined]
    host, port = _master_address()
    if place.is_lead and not _torchrun_keeps_store():
        listener = listen_at(host, own_address(host), port)
        return _tcp_store(host, port, is_master=True, master_listen_fd=listener.detach())
    return _tcp_store(host, port)


def _tcp_store(host: str, port: int, **options: Any) -> Any:
    return dist.TCPStore(host, port, timeout=_PATIENCE, wait_for_workers=False, **options)  # type: ignore[attr-defined]


def _master_address() -> tuple[str, int]:
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as exc:
        raise ConfigError(f"environment: expected MASTER_ADDR and a number in MASTER_PORT, found {exc}") from exc


def _torchrun_keeps_store() -> bool:
    """Whether torchrun's own store is to be used."""
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_kept and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise ConfigError(
            "parallel: torchrun would start these ranks again with the store of dead ranks, and they would look "
            "for them; start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or use `phalanx launch`"
        )
    return is_kept


def _heartbeat_threads(place: RankEnv, silence_s: float) -> HeartbeatThreads:
    """Open the heartbeats of this rank; rank 0 watches all others, all others watch rank 0."""
    watched = range(place.world) if place.is_lead else range(1)
    heartbeat: Heartbeat
    if place.rendezvous is not None:
        heartbeat = FileHeartbeat(place.rendezvous.parent, place.rank, watched)
    else:
        heartbeat = StoreHeartbeat(_tcp_store(*_master_address()), place.rank, watched)

    def end(rank: int, seconds: float) -> None:
        sys.stderr.write(
            f"error: rank {place.rank}: rank {rank} gave no sign of life for {seconds:.0f} s; this rank ends, so that "
            "all can be started again\n"
        )
        sys.stderr.flush()
        os._exit(PeerLostError.exit_code)

    return HeartbeatThreads(heartbeat, silence_s, None if place.is_kept else end)


def _present_key(rank: int) -> str:
    return f"phalanx/{rank}"


@contextlib.contextmanager
def _choose_interfaces(place: RankEnv, *, unsafe: bool) -> Iterator[None]:
    """Ranks of one machine talk over loopback; others over the interface that leads to rank 0, or that is named."""
    named = os.environ.get(_INTERFACE)
    if place.rendezvous is None:
        host, _ = _master_address()
        check_private(resolve_host(host), f"MASTER_ADDR={host}", unsafe=unsafe)
    if named is not None:
        for name in named.split(","):
            address = address_of(name)
            if address is not None:
                check_private(address, f"{_INTERFACE}={named}", unsafe=unsafe)
        yield
        return
    chosen = _LOOPBACK if place.is_on_one_machine else _interface_toward(_master_address()[0], unsafe=unsafe)
    variables = [name for name in (_INTERFACE, _NCCL_INTERFACE) if name not in os.environ]
    os.environ.update(dict.fromkeys(variables, chosen))
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _interface_toward(host: str, *, unsafe: bool) -> str:
    address = own_address(host)
    check_private(address, f"the way to MASTER_ADDR={host}", unsafe=unsafe)
    interface = interface_of(address)
    if interface is None:
        raise ConfigError(f"parallel: no interface is known to have {address}; name the private one in {_INTERFACE}")
    return interface


def _compare_configs(digest: str) -> None:
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
    first = mine.clone()
    dist.broadcast(first, src=0)
    differs = torch.tensor([int(not torch.equal(mine, first))])
    dist.all_reduce(differs)
    if int(differs):
        raise ConfigError(f"parallel: {int(differs)} of the ranks have another run file than rank 0; give all the same")
