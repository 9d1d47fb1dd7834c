"""Limits and deadlines of everything that crosses between parties."""

from typing import Annotated

from pydantic import Field

from phalanx.config import StrictModel


class TransportConfig(StrictModel):
    """The configuration of a party's end: how it listens and how much it lets others ask of it.

    Attributes:
        bind: Address to listen on; only this machine by default.
        port: 0 lets the system choose.
        timeout_s: How long a frame may take until its receipt is there, retries included.
        max_frame_bytes: Largest frame, header included.
        max_queued_bytes: Bound of each link's queue, on the sender's and on the receiver's side; frames
            without payload pass until twice this much.
        keepalive_s: A silent connection is probed after this time and dropped after as long again.
    """

    bind: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    timeout_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = 60.0
    max_frame_bytes: Annotated[int, Field(ge=4096, le=2**30)] = 64 * 1024 * 1024
    max_queued_bytes: Annotated[int, Field(ge=4096)] = 256 * 1024 * 1024
    keepalive_s: Annotated[float, Field(ge=0.1, le=3600, allow_inf_nan=False)] = 10.0
