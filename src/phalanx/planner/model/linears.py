"""The matrices of a block, by the names of transformers' modules."""

from dataclasses import dataclass

from phalanx.planner.model.families import FAMILIES, Feed
from phalanx.planner.model.shape import ModelShape


@dataclass(frozen=True)
class Linear:
    """One matrix of a block.

    Attributes:
        name: In the block.
        feed: What it multiplies.
        inputs: Their width.
        outputs: Width of the product.
    """

    name: str
    feed: Feed
    inputs: int
    outputs: int

    @property
    def is_row(self) -> bool:
        """Whether each tensor parallel rank has a part of its inputs, and not of its outputs."""
        return self.feed in ("mixed", "inner")


def linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the matrices of one block, in the order of the module."""
    return tuple(
        Linear(name, feed, shape.inputs(feed), shape.outputs(out))
        for name, feed, out in FAMILIES[shape.family].matrices
    )


def block_tensors(shape: ModelShape) -> int:
    """Return how many tensors the parameters of one block are; a bias counts for all columns or for none."""
    matrices = linears(shape)
    biases = sum(not one.is_row for one in matrices) if shape.layer_split > shape.layer_matrix else 0
    return len(matrices) + biases + shape.layer_whole // shape.hidden
