"""The values of a hub config, each checked when it is taken."""

from collections.abc import Mapping
from typing import Any

from phalanx.errors import ModelError

_SAVED_BY_ACTIVATION = {"relu": 1, "relu2": 2, "gelu": 2, "gelu_pytorch_tanh": 2, "silu": 2, "swish": 2, "gelu_new": 5}
"""Inner tensors that stay for the backward pass: a fused kernel's input and output; the parts of one that is composed.
relu is told from its output alone."""
_COMPOSED, _FUSED = "gelu_new", "gelu_pytorch_tanh"
"""One function: of many kernels, and of one."""
MAX_LAYERS, _MAX_SIZE = 10_000, 2**40
"""Layers are listed and built one by one, and a config may be a stranger's."""


def saved_by(activation: str) -> int:
    """Return how many inner tensors an activation function keeps; the most for an unknown one."""
    return _SAVED_BY_ACTIVATION.get(activation, max(_SAVED_BY_ACTIVATION.values()))


def composed_by(activation: str) -> int:
    """Return how many of them one kernel would not keep."""
    return _SAVED_BY_ACTIVATION[_COMPOSED] - _SAVED_BY_ACTIVATION[_FUSED] if activation == _COMPOSED else 0


class ConfigKeys:
    """A config's values."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where

    def read_size(self, *names: str, default: int | None = None) -> int:
        """Return the first of the names that is there and not null."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelError(f"{self._where}: {name}: found {value!r}; expected a whole number of at least 1")
            if value > (max_size := MAX_LAYERS if "layer" in name else _MAX_SIZE):
                raise ModelError(f"{self._where}: {name}: found {value!r:.40}; expected {max_size} at most")
            return value
        if default is None:
            raise ModelError(f"{self._where}: {names[0]}: missing; add it")
        return default

    def read_flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._config.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self._where}: {name}: found {value!r}; expected true or false")
        return value

    def require_value(self, name: str, expected: object) -> None:
        """Refuse any other value; a key that is missing or null has the expected one."""
        value = self._config.get(name)
        if value is not None and value != expected:
            raise self.refusal(name, value, f"only {expected!r} can be planned")

    def refusal(self, name: str, value: object, cure: str) -> ModelError:
        """Return the error about a key's value."""
        return ModelError(f"{self._where}: {name}: found {str(value)[:100]}; {cure}")

    def read_share(self, name: str, default: float) -> float:
        """Return a number from 0 to 1."""
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ModelError(f"{self._where}: {name}: found {value!r}; expected a number from 0 to 1")
        return float(value)

    def read_word(self, name: str, default: str) -> str:
        """Return a text, or the default where it is missing or empty."""
        return str(self._config.get(name) or default)

    def may_be_set(self, name: str) -> bool:
        """Return whether a value may be other than null: a key that is missing has transformers' default."""
        return self._config.get(name, ...) is not None

    def may_hold(self, name: str, word: str) -> bool:
        """Return whether a list may hold a word: transformers itself makes one that is missing."""
        value = self._config.get(name)
        return not isinstance(value, list | tuple) or word in value

    def saved_tensors(self, name: str, default: str) -> int:
        """Return how many inner tensors the activation function named there keeps; the most for an unknown one."""
        return saved_by(self.read_word(name, default))

    def composed_tensors(self, name: str, default: str) -> int:
        """Return how many of them one kernel would not keep."""
        return composed_by(self.read_word(name, default))

    def read_heads(self, hidden: int, *names: str) -> tuple[int, int]:
        """Return the number of heads and the width of one."""
        heads = self.read_size(*names)
        if hidden % heads and self._config.get("head_dim") is None:
            raise ModelError(
                f"{self._where}: hidden size {hidden} is no multiple of {heads} attention heads; change one of them"
            )
        return heads, hidden // heads
