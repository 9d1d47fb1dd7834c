"""The worker process: it multiplies the numbers that it receives, and holds no key to them."""

import numpy as np
import psutil
from numpy.typing import NDArray

from phalanx.errors import FrameError, PeerLostError
from phalanx.security.mask import MaskedWorker, ProductMessage
from phalanx.security.mask.ring import size_in_limbs
from phalanx.split.masked.config import MaskedWorkerConfig
from phalanx.split.masked.messages import (
    END,
    LOAD,
    MULTIPLY,
    PRODUCT,
    REFUSED,
    Load,
    Refusal,
    numbers_of_frame,
    read_load,
    read_masked,
    send_unreceipted,
    write_masked,
)
from phalanx.transport import CheckedFrame, Endpoint, OwnerLink, join_owner

_MATRIX_BYTES = 4096
"""What a matrix takes beside its numbers, at most: its name and the objects that hold it."""


def run_masked_worker(config: MaskedWorkerConfig) -> None:
    """Serve until the trusted side ends the run or is gone; with `rejoins`, until it ends the run.

    Args:
        config: This worker's identity, and where the trusted side listens.

    Raises:
        PeerLostError: The trusted side does not answer within `join_timeout_s`, or is gone.
    """
    while True:
        available = psutil.virtual_memory().available * 3 // 4
        max_bytes = available if config.memory_mib is None else config.memory_mib * 2**20
        with join_owner(config) as link:
            try:
                worker = MaskedWorker(config.device, numbers_of_frame(config.transport))
                ProductService(link.endpoint, worker, max_bytes).serve_link(link)
            except PeerLostError:
                if not config.rejoins:
                    raise
            else:
                return


class ProductService:
    """A service that answers one trusted side's frames, in the order in which they come.

    Args:
        max_bytes: Memory for all matrices together, those that are still coming included; None where the trusted side
            has started this process itself.
    """

    def __init__(self, endpoint: Endpoint, multiplier: MaskedWorker, max_bytes: int | None = None) -> None:
        self._endpoint, self._multiplier = endpoint, multiplier
        self._max_bytes, self._reserved_bytes = max_bytes, 0
        self._begun: set[ProductMessage] = set()
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
            self._reserve_memory(load)
            self._loading[product], self._filled[product] = np.empty((load.inner, load.columns), np.int32), 0
        values = self._loading.get(product)
        if values is None or values.shape != (load.inner, load.columns) or self._filled[product] != load.first:
            raise FrameError(f"{product}: rows from {load.first} on came out of order")
        values[load.first : load.first + load.rows] = rows
        self._filled[product] = load.first + load.rows
        if self._filled[product] == load.inner:
            del self._loading[product], self._filled[product]
            self._multiplier.load_matrix(product, values)

    def _reserve_memory(self, load: Load) -> None:
        """Refuse a matrix for which there is no room, before there is memory for it."""
        product = load.product_message
        if product in self._begun:
            raise FrameError(f"{product}: came before; a matrix is loaded once in a session")
        reserved_bytes = self._reserved_bytes + _MATRIX_BYTES + size_in_limbs(load.inner, load.columns)
        if self._max_bytes is not None and reserved_bytes > self._max_bytes:
            raise FrameError(
                f"{product}: with {load.inner} x {load.columns} numbers all matrices take {reserved_bytes} bytes, this "
                f"worker gives {self._max_bytes}; raise memory_mib in its file, or mask fewer layers"
            )
        self._begun.add(product)
        self._reserved_bytes = reserved_bytes


def _refuse_frame(item: CheckedFrame) -> None:
    raise FrameError(f"{item.kind!r} is no request")
