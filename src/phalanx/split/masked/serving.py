"""The worker process: it multiplies what it is sent, and knows nothing else."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import FrameError, PeerLostError
from phalanx.security.crypto import load_identity
from phalanx.security.mask import MaskedMessage, MaskedWorker, ProductMessage
from phalanx.split.masked.config import MaskedWorkerConfig
from phalanx.split.masked.messages import (
    END,
    LOAD,
    MULTIPLY,
    PRODUCT,
    REFUSED,
    Refusal,
    read_load,
    read_masked,
    send,
    write_masked,
)
from phalanx.transport import CheckedFrame, Endpoint, GrpcWire, JoinedPeer, LinkFault, describe

_LOOK_EVERY_S = 1.0


class Multiplier(Protocol):
    """The interface to the arithmetic of a worker process."""

    def load(self, product: ProductMessage, values: NDArray[np.int32]) -> None:
        """Keep a quantised matrix, ``[inner, columns]``."""
        ...

    def answer(self, request: MaskedMessage) -> MaskedMessage:
        """Multiply."""
        ...


def run_masked_worker(config: MaskedWorkerConfig, multiplier: Multiplier | None = None) -> None:
    """Serve until the trusted side ends the run or is gone.

    Args:
        config: This worker's identity, and where the trusted side listens.
        multiplier: Computes the products; another than the honest one is for drills only.

    Raises:
        PeerLostError: The trusted side cannot be reached, or is gone.
        CertificateError: This worker's own identity is unusable.
    """
    identity = load_identity(Path(config.identity))
    wire = GrpcWire(identity, config.transport)
    try:
        address = wire.address
        if config.advertise is not None:
            address = f"{config.advertise}:{address.rpartition(':')[2]}"

        def meet(patience_s: float, begins: bool) -> JoinedPeer:
            owner = config.owner
            return describe(identity, config.owner_name, owner, address, config.transport, patience_s, begins=begins)

        met = meet(config.join_timeout_s, begins=True)
        # known from the first moment on: the trusted side speaks first
        with Endpoint(identity, {met.peer.name: met.peer}, met.run, wire, config.transport) as endpoint:
            endpoint.add_peer(met.peer, config.owner)
            service = ProductService(endpoint, config.owner_name, multiplier or MaskedWorker(config.device))
            service.run(config.transport.timeout_s, lambda: meet(config.transport.timeout_s, begins=False).run)
    finally:
        wire.close()


class ProductService:
    """A service that answers one trusted side's frames, in the order in which they come.

    Args:
        endpoint: This worker's.
        owner: Party name of the trusted side; no other party is answered.
        multiplier: Computes the products.
    """

    def __init__(self, endpoint: Endpoint, owner: str, multiplier: Multiplier) -> None:
        self._endpoint, self._owner, self._multiplier = endpoint, owner, multiplier
        self._loading: dict[ProductMessage, NDArray[np.int32]] = {}
        self._filled: dict[ProductMessage, int] = {}

    def run(self, silence_s: float, look: Callable[[], str]) -> None:
        """Serve until told to end.

        Args:
            silence_s: After so long without a frame, look whether the trusted side is still there.
            look: Asks it which run it serves.

        Raises:
            PeerLostError: It is gone, or serves another run by now.
        """
        last = time.monotonic()
        while True:
            item = self._endpoint.receive(_LOOK_EVERY_S)
            if item is None:
                if time.monotonic() - last > silence_s:
                    if look() != self._endpoint.run:
                        raise PeerLostError(f"{self._owner}: serves another session by now; start this worker anew")
                    last = time.monotonic()
                continue
            last = time.monotonic()
            if isinstance(item, LinkFault):
                raise PeerLostError(f"{self._owner}: {item.error}")
            if item.kind == END:
                return
            self.take(item)

    def take(self, item: CheckedFrame) -> None:
        """Handle one frame; what cannot be answered is refused with its reason."""
        handle = {LOAD: self._load, MULTIPLY: self._multiply}.get(item.kind, _refuse)
        try:
            handle(item)
        except (FrameError, ValueError) as exc:
            # a matrix for which this device has no exact way is a ValueError
            send(self._endpoint, item.sender, REFUSED, Refusal(reason=str(exc)[:1000]).model_dump())

    def _multiply(self, item: CheckedFrame) -> None:
        body, payload = write_masked(self._multiplier.answer(read_masked(item.body, item.payload)))
        send(self._endpoint, item.sender, PRODUCT, body, [payload])

    def _load(self, item: CheckedFrame) -> None:
        about, rows = read_load(item.body, item.payload)
        product = about.product
        if about.first == 0:
            self._loading[product], self._filled[product] = np.empty((about.inner, about.columns), np.int32), 0
        values = self._loading.get(product)
        if values is None or values.shape != (about.inner, about.columns) or self._filled[product] != about.first:
            raise FrameError(f"{product}: rows from {about.first} on came out of order")
        values[about.first : about.first + about.rows] = rows
        self._filled[product] = about.first + about.rows
        if self._filled[product] == about.inner:
            del self._loading[product], self._filled[product]
            self._multiplier.load(product, values)


def _refuse(item: CheckedFrame) -> None:
    raise FrameError(f"{item.kind!r} is no request")
