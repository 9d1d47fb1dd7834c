"""The messages between the trusted side and the workers: uniform numbers, and which product they are for."""

from dataclasses import dataclass, field
from typing import Literal

from phalanx.errors import FrameError
from phalanx.security.mask.ring import Ring, require_ring

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class ProductMessage:
    """The name of a product.

    Attributes:
        direction: ``forward`` multiplies with its matrix, ``backward`` with the transpose of it.
    """

    layer: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.layer}, {self.direction}"


@dataclass(frozen=True, eq=False)
class MaskedMessage:
    """A message: a masked factor to a worker, or a product back from it.

    Attributes:
        number: Number of the pad; an answer has its request's.
        values: ``[rows, inner]`` to the worker, ``[rows, columns]`` back, elements of Z_p.
    """

    product: ProductMessage
    number: int
    values: Ring = field(repr=False)


def check_answer(request: MaskedMessage, answer: MaskedMessage, columns: int) -> Ring:
    """Return the numbers of an answer once they have the form that the request asks for.

    Raises:
        FrameError: The message answers another request, has another shape or type, or contains a number that is no
            element of Z_p.
    """
    if (answer.product, answer.number) != (request.product, request.number):
        raise FrameError(
            f"{request.product}: asked for number {request.number}, got an answer to {answer.number} of "
            f"{answer.product}; it is late, or the worker mixes requests up"
        )
    require_ring(answer.values, (len(request.values), columns))
    return answer.values
