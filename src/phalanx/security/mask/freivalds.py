"""Freivalds' check: is this the product? Two secret random vectors tell at a small part of the product's own cost."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import WrongProductError
from phalanx.security.mask.matrix import ring_matrix
from phalanx.security.mask.pads import PadSource
from phalanx.security.mask.ring import Ring, to_ring

NUM_VECTORS = 2


class ProductChecker(Protocol):
    """A check of products with one fixed right factor."""

    def require_product(self, left: Ring, product: Ring, where: str) -> None:
        """Accept a product, or raise.

        Args:
            left: ``[rows, inner]``.
            product: ``[rows, columns]``, said to be ``left @ right mod p``.
        """


class ProductCheck:
    """A check that accepts `y` as ``z @ W mod p`` if ``y @ s = z @ (W @ s) mod p`` for two secret vectors s.

    Args:
        right: ``[inner, columns]``, the integers W; multiplied once with the secret vectors, here.
        secrets: Draws the vectors; no other party may know them.

    Guarantees:
        A wrong product, however chosen, is accepted with probability 1 / p^2, about 2^-62: one wrong row of it is
        orthogonal to a uniform vector with probability 1 / p. A refused worker learns something about the vectors, so a
        check that has refused once refuses everything: make a new one.

    Source: Freivalds 1977; over a prime field, since over 2^k a wrong product can pass every other time.
    """

    def __init__(self, right: NDArray[np.int32], secrets: PadSource) -> None:
        vectors = secrets.draw_pad(right.shape[1], NUM_VECTORS).take_values()
        self._vectors = ring_matrix(vectors)
        self._images = ring_matrix(self._vectors.left_multiply(to_ring(right)))
        self._spent = False

    def require_product(self, left: Ring, product: Ring, where: str) -> None:
        """As `ProductChecker` says."""
        if self._spent:
            raise WrongProductError(f"{where}: its check has refused before and proves nothing now; make a new one")
        if not np.array_equal(self._vectors.left_multiply(product), self._images.left_multiply(left)):
            self._spent = True
            raise WrongProductError(
                f"{where}: is not the product of what was sent; the worker, or its machine, computes wrongly"
            )

    def __repr__(self) -> str:
        return "ProductCheck(...)"


class UnsafeNoChecker:
    """A check that accepts everything: it shows the damage of a worker whose products are not checked."""

    def require_product(self, left: Ring, product: Ring, where: str) -> None:
        """Accept."""
