"""The worker process: it multiplies the numbers that it receives, and holds no key to them."""

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import FrameError, PeerLostError
from phalanx.security.mask import MaskedWorker, ProductMessage
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
    send_unreceipted,
    write_masked,
)
from phalanx.transport import CheckedFrame, Endpoint, OwnerLink, join_owner


def run_masked_worker(config: MaskedWorkerConfig) -> None:
    """Serve until the trusted side ends the run or is gone; with `rejoins`, until it ends the run.

    Args:
        config: This worker's identity, and where the trusted side listens.

    Raises:
        PeerLostError: The trusted side does not answer within `join_timeout_s`, or is gone.
    """
    while True:
        with join_owner(config) as link:
            try:
                ProductService(link.endpoint, MaskedWorker(config.device)).serve_link(link)
            except PeerLostError:
                if not config.rejoins:
                    raise
            else:
                return


class ProductService:
    """A service that answers one trusted side's frames, in the order in which they come."""

    def __init__(self, endpoint: Endpoint, multiplier: MaskedWorker) -> None:
        self._endpoint, self._multiplier = endpoint, multiplier
        self._loading: dict[ProductMessage, NDArray[np.int32]] = {}
        self._filled: dict[ProductMessage, int] = {}

    def serve_link(self, link: OwnerLink) -> None:
        """Serve until told to end."""
        for item in link.receive_frames():
            if item.kind == END:
                return
            self.handle_frame(item)

    def handle_frame(self, item: CheckedFrame) -> None:
        """Handle one frame; what cannot be answered is refused with its reason."""
        handle = {LOAD: self._load_rows, MULTIPLY: self._answer_product}.get(item.kind, _refuse_frame)
        try:
            handle(item)
        except (FrameError, ValueError) as exc:
            # a matrix for which this device has no exact way is a ValueError
            send_unreceipted(self._endpoint, item.sender, REFUSED, Refusal(reason=str(exc)[:1000]).model_dump())

    def _answer_product(self, item: CheckedFrame) -> None:
        body, payload = write_masked(self._multiplier.answer_request(read_masked(item.body, item.payload)))
        send_unreceipted(self._endpoint, item.sender, PRODUCT, body, [payload])

    def _load_rows(self, item: CheckedFrame) -> None:
        load, rows = read_load(item.body, item.payload)
        product = load.product_message
        if load.first == 0:
            self._loading[product], self._filled[product] = np.empty((load.inner, load.columns), np.int32), 0
        values = self._loading.get(product)
        if values is None or values.shape != (load.inner, load.columns) or self._filled[product] != load.first:
            raise FrameError(f"{product}: rows from {load.first} on came out of order")
        values[load.first : load.first + load.rows] = rows
        self._filled[product] = load.first + load.rows
        if self._filled[product] == load.inner:
            del self._loading[product], self._filled[product]
            self._multiplier.load_matrix(product, values)


def _refuse_frame(item: CheckedFrame) -> None:
    raise FrameError(f"{item.kind!r} is no request")
