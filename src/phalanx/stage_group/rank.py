"""The work of ranks 1 and up of a stage's group: one order after the other, as rank 0 says."""

import contextlib
from collections.abc import Callable
from multiprocessing.connection import Client, Connection

from phalanx.config import digest_config
from phalanx.errors import ConfigError, StaleReplicaError
from phalanx.parallel import ParallelConfig, RankEnv, join_ranks
from phalanx.parallel.groups.mesh import Domain, open_domain
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.pipeline import PartyLayout, WorkerConfig, settle_numerics
from phalanx.pipeline.plan import parse_plan
from phalanx.stage_group.orders import read_order
from phalanx.stage_group.share import Share

LINE = "orders"
"""Name of the socket on which rank 0 gives orders, in the group's private directory."""

WrapShare = Callable[[Share], Share]
"""Function by which a drill puts a lying rank's share in the place of an honest one."""


def honest_share(share: Share) -> Share:
    """Return the share unchanged: every honest rank works with it."""
    return share


def run_group_rank(config: WorkerConfig, place: RankEnv, wrap_share: WrapShare = honest_share) -> None:
    """Be a rank of a stage's group until rank 0 has no more orders.

    Args:
        config: The worker file, the same as rank 0's.
        wrap_share: Puts a lying rank's share in the place of each honest one; for drills only.
    """
    if place.rendezvous is None or place.is_lead:
        raise ConfigError(f"rank {place.rank}: was not started by a worker with several ranks; start the worker")
    settle_numerics(config.threads)
    device = own_device(config.device, place)
    silence_s = config.parallel.silence_s
    with (
        Client(str(place.rendezvous.parent / LINE), "AF_UNIX") as connection,
        # rank 0 ends a rank that gives no heartbeat any more
        join_ranks(place, device, digest_config(config), silence_s=silence_s),
    ):
        run_orders(connection, open_domain(domain_config(config.parallel), device), wrap_share)


def run_orders(line: Connection, domain: Domain, wrap_share: WrapShare = honest_share) -> None:
    """Carry out orders until the line is closed."""
    shares: dict[int, Share] = {}
    while True:
        try:
            order = read_order(line.recv_bytes())
        except (EOFError, ConnectionError):
            return
        for copy_id in order.dropped:
            del shares[copy_id]
        if order.operation == "build":
            shares[order.copy_id] = wrap_share(Share(parse_plan(order.plan or {}), order.stage, domain))
            continue
        # rank 0 has found the same, and says so to its owner
        with contextlib.suppress(StaleReplicaError):
            shares[order.copy_id].run_order(order, None)


def domain_config(layout: PartyLayout) -> ParallelConfig:
    """The same layout as ``[parallel]`` has it."""
    return ParallelConfig.model_validate(layout.model_dump())
