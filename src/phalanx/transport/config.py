"""Limits and deadlines of everything that crosses between parties."""

import os
import socket
from typing import Annotated, Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.config.strict import later_key
from phalanx.errors import TransportError


class TransportConfig(StrictModel):
    """The configuration of a party's end: how it listens and how much it lets others ask of it.

    Attributes:
        bind: Address to listen on; only this machine by default.
        port: 0 lets the system choose.
        timeout_s: Time limit of a frame until its receipt is there, retries included.
        max_frame_bytes: Largest frame in bytes, header included; 4096 to 2**30.
        max_queued_bytes: Bound of each link's queue, on the sender's and on the receiver's side; frames
            without payload pass until twice this much.
        keepalive_s: A silent connection is probed after this time and dropped after as long again.
        post_quantum: With ``demand`` a link needs X25519MLKEM768, and each party a certificate with an ML-DSA-44 key;
            with ``offer`` both are used where the other end has them.
    """

    bind: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    timeout_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = 60.0
    max_frame_bytes: Annotated[int, Field(ge=4096, le=2**30)] = 64 * 1024 * 1024
    max_queued_bytes: Annotated[int, Field(ge=4096)] = 256 * 1024 * 1024
    keepalive_s: Annotated[float, Field(ge=0.1, le=3600, allow_inf_nan=False)] = 10.0
    post_quantum: Literal["offer", "demand"] = later_key("offer")


def check_port(config: TransportConfig, key: str) -> None:
    """Refuse an address that another process has, or that is none of this machine's; 0 is any free port.

    Args:
        config: Configuration of the listening party.
        key: The section that says so, for the message.

    Raises:
        TransportError: It cannot be listened at now. What comes between this look and the listening is found then.
    """
    if not config.port:
        return
    family = socket.AF_INET6 if ":" in config.bind else socket.AF_INET
    try:
        socket.create_server((config.bind, config.port), family=family).close()
    except OSError as exc:
        # Python puts the address into the text of the reason, which the message has already
        why = os.strerror(exc.errno or 0)
        do = f"end what listens there, or change {key}.port or {key}.bind"
        raise TransportError(f"{config.bind}:{config.port}: cannot listen ({why}); {do}").with_facts(
            code="PHX-T002",
            key=f"{key}.port",
            found=f"{config.bind}:{config.port}, {why}",
            expected="a free port",
            do=do,
        ) from exc


class JoiningWorkerConfig(StrictModel):
    """The part of a worker's file that says under which name it joins which owner.

    Attributes:
        identity: Directory with this worker's certificate and keys.
        owner: ``host:port`` of the owner.
        advertise: Host name or address under which the owner reaches this worker; left out, the one it binds to.
        join_timeout_s: Seconds to look for an owner that does not listen yet.
    """

    identity: str
    owner: str
    owner_name: str = "owner"
    advertise: str | None = None
    join_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    transport: TransportConfig = TransportConfig()
