"""Low-rank adapters beside frozen matrices: their size in a block, and the supported ones."""

from dataclasses import dataclass
from typing import Literal

from phalanx.errors import ConfigError
from phalanx.planner.model.families import FAMILIES, Feed
from phalanx.planner.model.shape import ModelShape


@dataclass(frozen=True)
class Linear:
    """One matrix of a block.

    Attributes:
        outputs: Width of the matrix's product.
    """

    name: str
    feed: Feed
    inputs: int
    outputs: int

    @property
    def is_row(self) -> bool:
        """Whether each tensor parallel rank has a part of its inputs, and not of its outputs."""
        return self.feed in ("mixed", "inner")


def linears_of(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the matrices of one block, in the order of the module."""
    return tuple(
        Linear(name, feed, shape.input_width(feed), shape.output_width(out))
        for name, feed, out in FAMILIES[shape.family].matrices
    )


def block_tensors(shape: ModelShape) -> int:
    """Return how many tensors the parameters of one block are; a bias counts for all columns or for none."""
    matrices = linears_of(shape)
    biases = sum(not linear.is_row for linear in matrices) if shape.layer_split > shape.layer_matrix else 0
    return len(matrices) + biases + shape.layer_whole // shape.hidden


PromptEncoding = Literal["mlp", "lstm", "none"]


@dataclass(frozen=True)
class PlannedPrompt:
    """Virtual tokens before the text, and what makes embeddings of them, where the model embeds.

    Attributes:
        tokens: Number of virtual tokens; rows become longer by it.
        encoder: Network that makes their embeddings.
        encoder_size: Width of its hidden layers; that of the model where there is none.
    """

    tokens: int
    encoder: PromptEncoding
    encoder_size: int | None = None

    def num_parameters(self, hidden: int) -> int:
        """Return the number of trained parameters beside a model of this width."""
        inner = self.encoder_size or hidden
        table = self.tokens * hidden
        if self.encoder == "none":
            return table
        if self.encoder == "mlp":
            return (
                table
                + _linear_parameters(hidden, inner)
                + _linear_parameters(inner, inner)
                + _linear_parameters(inner, hidden)
            )
        # two layers in both directions, the second one behind both of the first
        gates = sum(2 * 4 * inner * (inputs + inner + 2) for inputs in (hidden, 2 * inner))
        return table + gates + _linear_parameters(2 * inner, 2 * inner) + _linear_parameters(2 * inner, hidden)


def _linear_parameters(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


@dataclass(frozen=True)
class Adapter:
    """Two thin matrices beside each of some frozen ones; only they are trained.

    Attributes:
        rank: Inner dimension of the matrices.
        targets: Names of matrices, or the ends of their names; empty for a family's usual ones.
        drops: Some of their inputs are dropped at random.
        dora: The size of each output's weights is trained too.
        virtual_tokens: Number of trained keys and values before the keys and values of each block's tokens.
        prompt: Trained instead, before the text.
    """

    rank: int
    targets: tuple[str, ...] = ()
    drops: bool = False
    dora: bool = False
    virtual_tokens: int = 0
    prompt: PlannedPrompt | None = None


def adapted_linears(shape: ModelShape, adapter: Adapter) -> tuple[Linear, ...]:
    """Return the matrices of a block that have an adapter."""
    if adapter.virtual_tokens or adapter.prompt is not None:
        return ()
    matrices, targets = linears_of(shape), adapter.targets or FAMILIES[shape.family].adapter_targets
    for target in targets:
        if not any(_is_target(linear, target) for linear in matrices):
            raise ConfigError(
                f"model.adapter.targets: found {target!r}; the matrices of {shape.family} are "
                f"{', '.join(linear.name for linear in matrices)}"
            )
    return tuple(linear for linear in matrices if any(_is_target(linear, target) for target in targets))


def adapter_numbers(shape: ModelShape, adapter: Adapter, tp: int = 1) -> int:
    """Count the trained numbers of a block on a tensor parallel rank: A whole, B's part and sizes of its own columns.

    Of virtual tokens it is the keys and values of the rank's own heads.
    """
    per_output = adapter.rank + adapter.dora
    virtual = 2 * adapter.virtual_tokens * -(-shape.kv_heads // tp) * shape.head_dim
    return virtual + sum(
        adapter.rank * linear.inputs + per_output * -(-linear.outputs // tp)
        for linear in adapted_linears(shape, adapter)
    )


def describe_adapter_refusal(shape: ModelShape, adapter: Adapter, tp: int) -> str | None:
    """Say why tensor parallel ranks cannot have these adapters; None where they can."""
    stray = [linear.name for linear in adapted_linears(shape, adapter) if linear.is_row]
    if tp == 1 or not stray:
        return None
    columns = ", ".join(linear.name for linear in linears_of(shape) if not linear.is_row)
    return (
        f"tp={tp}: adapters on {', '.join(stray)}, of whose inputs each rank has a part, are not cut; take {columns}, "
        "or set tp to 1"
    )


def _is_target(one: Linear, target: str) -> bool:
    return f".{one.name}".endswith(f".{target}")
