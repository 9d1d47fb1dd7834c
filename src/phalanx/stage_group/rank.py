"""What ranks 1 and up of a stage's group do: one deed after the other, as rank 0 says."""

from multiprocessing.connection import Client, Connection

from phalanx.config import digest
from phalanx.errors import ConfigError
from phalanx.parallel import ParallelConfig, RankEnv, join
from phalanx.parallel.groups.mesh import Domain, open_domain
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.pipeline import WorkerConfig, settle_numerics
from phalanx.pipeline.plan import parse_plan
from phalanx.stage_group.orders import GroupCommand, hand_round, read_order
from phalanx.stage_group.share import Share

LINE = "orders"
"""Name of the socket on which rank 0 gives orders, in the group's private directory."""


def follow(config: WorkerConfig, place: RankEnv) -> None:
    """Be a rank of a stage's group until rank 0 has no more orders.

    Args:
        config: The worker file, the same as rank 0's.
        place: This process's.

    Raises:
        ConfigError: This place is no rank of a group.
        PeerLostError: The ranks did not find each other.
    """
    if place.rendezvous is None or place.is_lead:
        raise ConfigError(f"rank {place.rank}: was not started by a worker with tensor_parallel; start the worker")
    settle_numerics(config.threads)
    device = own_device(config.device, place)
    with Client(str(place.rendezvous.parent / LINE), "AF_UNIX") as line, join(place, device, digest(config)):
        obey(line, open_domain(ParallelConfig(tp=place.world), device))


def obey(line: Connection, domain: Domain) -> None:
    """Carry out orders until the line is closed."""
    shares: dict[int, Share] = {}
    while True:
        try:
            order = read_order(line.recv_bytes())
        except (EOFError, ConnectionError):
            return
        for copy_id in order.dropped:
            del shares[copy_id]
        _carry_out(order, shares, domain)


def _carry_out(order: GroupCommand, shares: dict[int, Share], domain: Domain) -> None:
    if order.deed == "build":
        shares[order.copy_id] = Share(parse_plan(order.plan or {}), order.stage, domain)
        return
    share = shares[order.copy_id]
    if order.deed == "weights":
        share.fill(None)
    elif order.deed == "gradients":
        share.gradients()
    else:
        share.perform(order, [hand_round(None, cargo, domain.device) for cargo in order.cargo])
