"""The mode that puts the law of exact arithmetic in force.

It stands below autograd, so a model, its adapters, its objective and their backward passes obey it without a line of
their own. Operators that move data, compare, or round each number once are left to torch; others are replaced by those
of `operators.py`; one that is in neither is refused by its name.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeGuard

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.errors import ModelError
from phalanx.exact.operators import LAW, PRODUCTS
from phalanx.exact.products import BITS, FixedPoint, multiply

Grade = Literal["exact", "exact_fast"]


def is_grade(precision: str) -> TypeGuard[Grade]:
    """Whether a precision is a grade of the law, and none of torch's own."""
    return precision in BITS


_MOVES = (
    "_local_scalar_dense _reshape_alias _to_copy _unsafe_view abs alias all amax amin any arange argmax bitwise_and "
    "bitwise_not bitwise_or cat ceil clamp clamp_ clamp_max clamp_min clone constant_pad_nd copy_ detach detach_ "
    "diagonal embedding empty empty_like empty_strided eq equal expand fill fill_ flip floor full full_like gather ge "
    "gt index index_select isfinite isinf isnan le lift_fresh logical_and logical_not lt masked_fill masked_fill_ "
    "masked_select max maximum min minimum ne neg new_empty new_empty_strided new_full new_ones new_zeros "
    "nll_loss_backward nonzero ones ones_like permute relu relu_ repeat resize_ round scalar_tensor scatter select "
    "select_backward sgn sign slice slice_backward slice_scatter split split_with_sizes squeeze stack t "
    "threshold_backward transpose tril triu unbind unfold unsqueeze view where zero_ zeros zeros_like"
)
_ROUND_ONCE = "div_ mul mul_"
_SINGLE = {name.strip() for name in f"{_MOVES} {_ROUND_ONCE}".split()}
"""Names of operators whose bits IEEE 754 or their meaning decides."""


class ExactArithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which every operator gives the bits of the law, or is refused.

    Args:
        grade: Number of bits that products have, by name.
        weights: Parameters whose integers are kept while their values stay as they are: they are rounded once a step.

    Raises:
        ModelError: An operator has no law; torch's own would compute other bits on another processor.
    """

    def __init__(self, grade: Grade, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bits = BITS[grade]
        self._grade = grade
        self._weights = {weight.untyped_storage().data_ptr(): weakref.ref(weight) for weight in weights}
        self._rounded: dict[tuple[Any, ...], tuple[int, FixedPoint]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        law = LAW.get(func)
        if law is not None:
            return law(self._multiply_rounded, *args, **named) if law in PRODUCTS else law(*args, **named)
        if func.overloadpacket.__name__ not in _SINGLE:
            leaves = tree_leaves((args, dict(named)))
            if any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
                raise ModelError(
                    f'train.numerics = "{self._grade}": operator {func} has no law, so its bits depend on the '
                    'processor; use numerics = "float", or a model without it'
                )
        return func(*args, **named)

    def _round_rows(self, x: Tensor) -> FixedPoint:
        """Round rows of an operand, or return the integers of a weight that has not changed since."""
        weight = self._weights.get(x.untyped_storage().data_ptr(), lambda: None)()
        if weight is None or weight.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            return FixedPoint.round_rows(x, self._bits)
        key, version = (x.data_ptr(), tuple(x.shape), x.stride()), weight._version
        entry = self._rounded.get(key)
        if entry is None or entry[0] != version:
            entry = self._rounded[key] = (version, FixedPoint.round_rows(x, self._bits))
        return entry[1]

    def _multiply_rounded(self, left: Tensor, right: Tensor) -> Tensor:
        return multiply(self._round_rows(left), self._round_rows(right.mT))
