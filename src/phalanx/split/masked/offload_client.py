"""The trusted side's offload client: layers hand in their inputs, workers see masked numbers only."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ConfigError, PadError, WrongProductError
from phalanx.security.mask import (
    MaskedMessage,
    MaskedProduct,
    PendingProduct,
    ProductCheck,
    ProductMessage,
    masked_linear,
)
from phalanx.split.masked.config import MAX_ROWS, MaskedConfig
from phalanx.split.masked.pad_sources import PadSources
from phalanx.split.masked.port import WorkerPort

Reals = NDArray[np.float32]
_DEFAULTS = MaskedConfig()


class OffloadClient(Protocol):
    """The interface through which masked layers have their products made."""

    def add_layer(self, layer: str, weight: Reals) -> None:
        """Take on a frozen layer.

        Args:
            layer: Its name, which no other layer has at this client.
            weight: ``[inner, columns]``.
        """

    def multiply_rows(self, product: ProductMessage, x: Reals) -> Reals:
        """Return ``x @ W``, ``[rows, columns]``, for the forward product, ``x @ W^T`` for the backward one.

        Args:
            product: Product of a layer that was added.
            x: ``[rows, inner]``.
        """


class MaskingClient:
    """An offload client that masks, asks, checks and unmasks. Several threads may use it.

    Args:
        worker: Sees masked activations and gradients.
        config: Number and rows of pads, and the behaviour when none is ready.
        second: Makes the pads' products; left out, they are made here.

    Guarantees:
        Every request, also one that activation checkpointing or a repeated step causes, gets a new pad. Nothing leaves
        without one. An answer is used only after its check, and its use does not depend on the pad: the same input
        gives the same result bit for bit.
    """

    def __init__(
        self,
        worker: WorkerPort,
        pads: PadSources,
        config: MaskedConfig = _DEFAULTS,
        second: WorkerPort | None = None,
    ) -> None:
        if config.second_worker != (second is not None):
            raise ConfigError(
                f"masked.second_worker is {str(config.second_worker).lower()}, and "
                f"{'no second worker' if second is None else second.name} is there; make them agree"
            )
        if second is not None and second.name == worker.name:
            raise ConfigError(
                f"{worker.name}: is named as both workers and would see pads and masked values; name two workers"
            )
        self._worker, self._second, self._pads, self._config = worker, second, pads, config
        self._masked_products: dict[ProductMessage, MaskedProduct] = {}
        # one fills and one takes at a time, which may be two threads: the pools are made for that
        self._filling, self._taking = threading.Lock(), threading.Lock()
        self.pads_wanted = threading.Event()
        """Set whenever pads were taken or a layer was added; the thread that fills in idle time waits for it."""
        self.late_pads = 0
        """Pads that were made while a layer waited for them."""

    def add_layer(self, layer: str, weight: Reals) -> None:
        """As `OffloadClient` says."""
        products = masked_linear(layer, weight, self._rows_per_request(weight), self._pads, self._config.bound)
        if products.forward.product in self._masked_products:
            raise ConfigError(f"{layer}: is at this client already; give each module a name of its own")
        for side in (products.forward, products.backward):
            for worker in (self._worker, self._second):
                if worker is not None:
                    worker.load_matrix(side.product, side.weight.values)
        self._masked_products.update({side.product: side for side in (products.forward, products.backward)})
        self.pads_wanted.set()

    def multiply_rows(self, product: ProductMessage, x: Reals) -> Reals:
        """As `OffloadClient` says.

        Raises:
            PadError: No pad is ready and none may, or can, be made now.
            WrongProductError: A worker lied; its name is in the message, and the product's check is spent.
        """
        side = self._masked_product(product)
        columns = side.weight.values.shape[1]
        if not len(x):
            return np.empty((0, columns), np.float32)
        rows = side.pool.rows
        sent = self._mask_parts(side, [x[start : start + rows] for start in range(0, len(x), rows)])
        answers = self._worker.multiply_masked([side.request for side in sent])
        blocks = [self._unmask_answer(side, *pair) for pair in zip(sent, answers, strict=True)]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def fill_pools(self, count: int) -> int:
        """Make pads until every product has so many ready."""
        return sum(self._fill_pool(side, count) for side in tuple(self._masked_products.values()))

    def renew_check(self, product: ProductMessage) -> None:
        """Draw new secret vectors for a product with a check that has refused, before another worker computes it."""
        side = self._masked_product(product)
        check = ProductCheck(side.weight.values, self._pads(product))
        self._masked_products[product] = replace(side, check=check)

    def _masked_product(self, product: ProductMessage) -> MaskedProduct:
        if product not in self._masked_products:
            raise ConfigError(f"{product}: is not at this client; add its layer first")
        return self._masked_products[product]

    def _rows_per_request(self, weight: Reals) -> int:
        """Return the rows of one request: as configured, or fewer if request or answer would be too large."""
        max_numbers = min(worker.max_numbers for worker in (self._worker, self._second) if worker is not None)
        return max(1, min(self._config.rows or MAX_ROWS, max_numbers // int(max(weight.shape))))

    def _mask_parts(self, side: MaskedProduct, parts: Sequence[Reals]) -> list[PendingProduct]:
        with self._taking:
            missing = len(parts) - len(side.pool)
            if missing > 0 and not self._config.late_pads:
                raise PadError(
                    f"{side.product}: {len(parts)} pads are needed, {len(side.pool)} are ready, and nothing is sent "
                    "without; raise masked.reserve, or set masked.late_pads = true"
                )
            if missing > 0:
                self.late_pads += self._fill_pool(side, len(parts))
            sent = [side.mask_rows(part) for part in parts]
        self.pads_wanted.set()
        return sent

    def _fill_pool(self, side: MaskedProduct, count: int) -> int:
        with self._filling:
            missing = max(0, count - len(side.pool))
            if self._second is None:
                for _ in range(missing):
                    side.pool.make_pad()
            elif missing:
                asked = [side.pool.request_pad() for _ in range(missing)]
                for answer in self._second.multiply_masked(asked):
                    with _naming_worker(self._second):
                        side.pool.accept_product(answer, side.check)
            return missing

    def _unmask_answer(self, side: MaskedProduct, sent: PendingProduct, answer: MaskedMessage) -> Reals:
        with _naming_worker(self._worker):
            return side.unmask_answer(sent, answer)


@contextlib.contextmanager
def _naming_worker(worker: WorkerPort) -> Iterator[None]:
    try:
        yield
    except WrongProductError as exc:
        raise WrongProductError(f"{worker.name}: {exc}") from exc
