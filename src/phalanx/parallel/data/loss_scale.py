"""The scale of an fp16 loss, by which small gradients are not rounded to zero."""

_FIRST = 2.0**16
_HIGHEST = 2.0**24
_PATIENCE = 2000


class LossScale:
    """A power of two that is halved when a gradient overflows, and doubled after 2000 steps in which none did.

    All ranks see the same norm of the whole gradient, so they halve and double together, which torch's own scaler
    leaves to each process. A step that overflowed is done again; no batch is lost to it.

    Args:
        is_needed: In float16; otherwise the scale is 1 for good.

    Attributes:
        value: The scale now.

    Source: Micikevicius et al. 2018, section 3.2.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self.value = _FIRST if is_needed else 1.0
        self._is_needed = is_needed
        self._clean_steps = 0

    def lower(self) -> bool:
        """Halve the scale after an overflow; False where it is 1 already, so that it was not to blame."""
        self._clean_steps = 0
        if self.value <= 1.0:
            return False
        self.value /= 2.0
        return True

    def settle(self) -> None:
        """A step was applied."""
        self._clean_steps += 1
        if self._is_needed and self._clean_steps >= _PATIENCE:
            self.value = min(_HIGHEST, 2.0 * self.value)
            self._clean_steps = 0
