"""The owner's side of joining: wait until every named worker has said hello, and tell it the plan."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

from phalanx.errors import FrameError, PeerLostError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.lives import Lives
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
    may_be_absent: bool = False,
    lives: Lives | None = None,
) -> Members:
    """Let the named workers in and set them up; what one of them does or leaves undone stops none of the others.

    Args:
        endpoint: The owner's.
        plan: What every worker gets.
        certificates: PEM by worker name; nobody else is let in.
        authority_pem: Who vouches for the certificates.
        late: PEM by name of those who may join at any time and are not waited for.
        is_alive: Whether a local worker's process still runs.
        last_words: What a worker said last, for the error.
        timeout_s: Longest time to wait for all.
        lives: Told who has come: a second process of the same certificate waits until the first one is given up.
        may_be_absent: Whether to go on, after that time, with those that have come; who is missing may come later.

    Raises:
        PeerLostError: A worker ended or did not come, and may not be absent, or nobody has come.
        CertificateError: A certificate is not what it should be.
    """
    for certificate in (*certificates.values(), *late.values()):
        endpoint.add_peer(peer_from_certificate(certificate.encode(), authority_pem))
    classes = {OWNER: local_numeric_class(plan.device).label}
    addresses: dict[str, str] = {}
    rooms: dict[str, Rooms] = {}
    unreachable: list[LinkFault] = []
    deadline = time.monotonic() + timeout_s
    while set(certificates) - addresses.keys():
        missing = sorted(set(certificates) - addresses.keys())
        dead = [name for name in missing if not is_alive(name)]
        if dead:
            raise PeerLostError(f"{dead[0]} ended before it joined: {last_words(dead[0])}")
        if time.monotonic() > deadline and addresses and may_be_absent:
            break
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"{', '.join(missing)} did not join within {timeout_s:.0f} s; start them with `phalanx worker`"
            )
        frame = endpoint.receive(0.2)
        if isinstance(frame, LinkFault):
            unreachable.append(frame)
        if frame is None or isinstance(frame, LinkFault) or frame.sender in addresses:
            # whoever has said hello has no second address and gets no second plan
            continue
        try:
            hello = parse_message(frame.kind, frame.body)
        except FrameError:
            continue
        if isinstance(hello, Hello):
            addresses[frame.sender], classes[frame.sender] = hello.address, hello.numeric_class
            rooms[frame.sender] = hello.memory
            endpoint.add_peer(endpoint.peers[frame.sender], hello.address)
            if lives is not None:
                lives.came(frame.sender)
            setup = Setup(epoch=0, plan=plan.model_dump(mode="json"))
            # its link has failed already, which is in the mail
            with contextlib.suppress(PeerLostError):
                endpoint.send(frame.sender, setup.kind, setup.model_dump(mode="json"))
    known = {**certificates, **late}
    names = _workers(addresses, known)
    # last of all: what the others on this machine took for themselves is no longer free
    rooms[OWNER] = own_rooms(endpoint.run, plan.device)
    authority = authority_pem.decode("ascii")
    return Members(names, classes, addresses, known, rooms, authority, unreachable=unreachable, lives=lives)


def _workers(addresses: Mapping[str, str], certificates: Mapping[str, str]) -> Sequence[str]:
    """In the order of the run file, not of arrival."""
    return [name for name in certificates if name in addresses]
