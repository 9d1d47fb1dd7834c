"""The tensors that cross, with their shapes: the run decides them, never the party that sends one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from phalanx.objectives import ExtraRows
from phalanx.security.seal import Purpose, TensorKind

What = Literal["train", "held_out"]
WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


@dataclass(frozen=True)
class TensorKinds:
    """The tensors of one run.

    Attributes:
        hidden: Width of what crosses: the model's, and one more where borders of documents go with it.
        wire: Precision of activations, a key of `WIRE_DTYPES`.
        label_shape: Shape of the labels of so many rows of so many tokens.
        extras: More rows that the objective reads in training, by name.
        num_answers: Numbers that come back for so many held-out rows, beside loss and targets.
        held_out_extras: More rows that a measurement reads, by name.
        num_pair_sums: Sums over held-out pairs that come back behind these.
    """

    rows: int
    seq: int
    hidden: int
    wire: str
    label_shape: Callable[[int, int], tuple[int, ...]]
    num_answers: Callable[[int], int] = lambda rows: 0
    extras: Mapping[str, ExtraRows] = field(default_factory=dict)
    held_out_extras: Mapping[str, ExtraRows] = field(default_factory=dict)
    num_pair_sums: int = 0

    def extra_names(self, what: What) -> list[str]:
        """Return the names of the extra rows of a microbatch, in the order in which they cross."""
        return sorted(self.extras if what == "train" else self.held_out_extras)

    def cut_kind(self, what: What, rows: int) -> TensorKind:
        """Hidden states behind the front part, ``[rows, seq, hidden]``."""
        dtype = str(WIRE_DTYPES[self.wire]).removeprefix("torch.")
        return TensorKind(Purpose.ACTIVATION, f"cut.{what}", dtype, (rows, self.seq, self.hidden))

    def label_kind(self, what: What, rows: int) -> TensorKind:
        """What the task learns, int64."""
        return TensorKind(Purpose.LABEL, f"labels.{what}", "int64", self.label_shape(rows, self.seq))

    def microbatch_kinds(self, what: What, rows: int) -> tuple[TensorKind, ...]:
        """All tensors of a microbatch, in the order in which they cross: activations, labels, extra rows by name."""
        more = (self.extra_rows_kind(name, rows) for name in self.extra_names(what))
        return self.cut_kind(what, rows), self.label_kind(what, rows), *more

    def extra_rows_kind(self, name: str, rows: int) -> TensorKind:
        """Extra rows of one name, as the objective declares them."""
        kind = self.extras[name]
        return TensorKind(Purpose.LABEL, f"extra.{name}", kind.dtype, kind.rows_shape(rows, self.seq))

    @staticmethod
    def result_kind(what: What, numbers: int) -> TensorKind:
        """What comes back: losses, counts and the gradient's norm, float64."""
        return TensorKind(Purpose.RESULT, f"result.{what}", "float64", (numbers,))

    @staticmethod
    def total_kind(what: What, numbers: int) -> TensorKind:
        """What a turn came to over all clients, for the owner, float64."""
        return TensorKind(Purpose.RESULT, f"total.{what}", "float64", (numbers,))

    @staticmethod
    def adapter_kind(name: str, shape: tuple[int, ...]) -> TensorKind:
        """A released parameter, float32."""
        return TensorKind(Purpose.ADAPTER, name, "float32", shape)
