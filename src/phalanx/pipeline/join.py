"""The owner's side of joining: wait until every named worker has said hello, and tell it the plan."""

import time
from collections.abc import Callable, Mapping, Sequence

from phalanx.errors import FrameError, PeerLostError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.members import Members
from phalanx.pipeline.memory import Rooms
from phalanx.pipeline.messages import Hello, Setup, parse_message
from phalanx.pipeline.numeric_class import local_numeric_class
from phalanx.pipeline.own_memory import own_rooms
from phalanx.pipeline.plan import StepPlan
from phalanx.security.crypto import peer_from_certificate
from phalanx.transport import Endpoint, LinkFault

NOBODY: Mapping[str, str] = {}


def gather(
    endpoint: Endpoint,
    plan: StepPlan,
    certificates: Mapping[str, str],
    authority_pem: bytes,
    *,
    late: Mapping[str, str] = NOBODY,
    is_alive: Callable[[str], bool],
    last_words: Callable[[str], str],
    timeout_s: float,
) -> Members:
    """Let the named workers in and set them up.

    Args:
        endpoint: The owner's.
        plan: What every worker gets.
        certificates: PEM by worker name; nobody else is let in.
        authority_pem: Who vouches for the certificates.
        late: PEM by name of those who may join at any time and are not waited for.
        is_alive: Whether a local worker's process still runs.
        last_words: What a worker said last, for the error.
        timeout_s: Longest time to wait for all.

    Raises:
        PeerLostError: A worker ended or did not come.
        CertificateError: A certificate is not what it should be.
    """
    for certificate in (*certificates.values(), *late.values()):
        endpoint.add_peer(peer_from_certificate(certificate.encode(), authority_pem))
    classes = {OWNER: local_numeric_class(plan.device).label}
    addresses: dict[str, str] = {}
    rooms: dict[str, Rooms] = {}
    deadline = time.monotonic() + timeout_s
    while set(certificates) - addresses.keys():
        missing = sorted(set(certificates) - addresses.keys())
        dead = [name for name in missing if not is_alive(name)]
        if dead:
            raise PeerLostError(f"{dead[0]} ended before it joined: {last_words(dead[0])}")
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"{', '.join(missing)} did not join within {timeout_s:.0f} s; start them with `phalanx worker`"
            )
        frame = endpoint.receive(0.2)
        if frame is None or isinstance(frame, LinkFault):
            continue
        try:
            hello = parse_message(frame.kind, frame.body)
        except FrameError:
            continue
        if isinstance(hello, Hello):
            addresses[frame.sender], classes[frame.sender] = hello.address, hello.numeric_class
            rooms[frame.sender] = hello.memory
            endpoint.add_peer(endpoint.peers[frame.sender], hello.address)
            setup = Setup(epoch=0, plan=plan.model_dump(mode="json"))
            endpoint.send(frame.sender, setup.kind, setup.model_dump(mode="json"))
    known = {**certificates, **late}
    names = _workers(addresses, known)
    # last of all: what the others on this machine took for themselves is no longer free
    rooms[OWNER] = own_rooms(endpoint.run, plan.device)
    return Members(names, classes, addresses, known, rooms, authority_pem.decode("ascii"))


def _workers(addresses: Mapping[str, str], certificates: Mapping[str, str]) -> Sequence[str]:
    """In the order of the run file, not of arrival."""
    return [name for name in certificates if name in addresses]
