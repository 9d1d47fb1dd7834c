"""Honest workers that really compute in different ways, in the one process of a simulated company."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from phalanx.lab.calibrate import NumericPath
from phalanx.pipeline import StageCopy, StageRunner, WrapCopy, token_distance

# threads, kernels and switches of a path belong to the whole process
_ONE_AT_A_TIME = threading.RLock()
_COMPUTATIONS = ("forward", "backward", "recompute_microbatch")

_Place = tuple[int, int, int, str]
"""A place of a message: stage, step, microbatch, direction."""


@dataclass
class HonestDistances:
    """Distances between honest messages and the results of their honest auditors.

    Attributes:
        messages: Number of messages that both sides have computed.
        unequal: Number of them that differ in a bit: the guard had to compare their distance.
        largest: Largest of their distances, as `token_distance` has it.
    """

    messages: int = 0
    unequal: int = 0
    largest: float = 0.0
    _sent: dict[_Place, Tensor] = field(default_factory=dict)

    def note_sent(self, place: _Place, tensor: Tensor) -> None:
        """Keep a message of a stage until its auditor has computed it too."""
        self._sent[place] = tensor

    def compare_recomputed(self, place: _Place, tensor: Tensor) -> None:
        """Compare with the sent message."""
        sent = self._sent.pop(place, None)
        if sent is None:
            return
        self.messages += 1
        if not sent.equal(tensor):
            self.unequal += 1
            self.largest = max(self.largest, token_distance(sent, tensor))

    def drop_before(self, stage: int, before: int) -> None:
        """Drop messages of earlier steps, which no party will audit any more."""
        for place in [place for place in self._sent if place[0] == stage and place[1] < before]:
            del self._sent[place]


class PathRunner(StageRunner):
    """A runner that computes a stage on another numeric path of this machine, one party at a time."""

    def __init__(self, copy: StageCopy, path: NumericPath, seen: Callable[[_Place, Tensor], None]) -> None:
        self._inner = path.make_runner(copy.plan, copy)
        self.module, self.spec = copy.module, copy.spec
        self.seed, self.device = self._inner.seed, self._inner.device
        self._path, self._seen = path, seen

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        with self._on_path():
            y = self._inner.forward(step, microbatch, x)
            self._seen((self.spec.index, step, microbatch, "forward"), y)
        return y

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        with self._on_path():
            x_gradient = self._inner.backward(step, microbatch, gradient)
            if x_gradient is not None:
                self._seen((self.spec.index, step, microbatch, "backward"), x_gradient)
        return x_gradient

    def recompute_microbatch(
        self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        with self._on_path():
            y, x_gradient = self._inner.recompute_microbatch(step, microbatch, x, gradient)
            self._seen((self.spec.index, step, microbatch, "forward"), y)
            if x_gradient is not None:
                self._seen((self.spec.index, step, microbatch, "backward"), x_gradient)
        return y, x_gradient

    def take_gradients(self) -> dict[str, Tensor]:
        return self._inner.take_gradients()

    def abandon_step(self) -> None:
        self._inner.abandon_step()

    @contextlib.contextmanager
    def _on_path(self) -> Iterator[None]:
        with _ONE_AT_A_TIME, self._path.switch_process():
            yield


def wrap_on_path(path: NumericPath, differences: HonestDistances) -> WrapCopy:
    """Return a wrapper that makes a worker compute all its copies on one path; for use inside `one_party_at_a_time`."""

    def wrap(copy: StageCopy, held: bool) -> StageCopy:
        def sent(place: _Place, tensor: Tensor) -> None:
            differences.drop_before(place[0], place[1])
            differences.note_sent(place, tensor)

        copy.runner = PathRunner(copy, path, sent if held else differences.compare_recomputed)
        return copy

    return wrap


@contextlib.contextmanager
def one_party_at_a_time() -> Iterator[None]:
    """Let one party of this process, the owner's referee included, compute at a time, so that no path affects another.

    A referee that recomputed with the settings of another party's path would find other bits than an honest holder
    of its own numeric class has sent, and convict it.
    """
    plain = {name: getattr(StageRunner, name) for name in _COMPUTATIONS}
    for name, compute in plain.items():
        setattr(StageRunner, name, _with_lock(compute))
    try:
        yield
    finally:
        for name, compute in plain.items():
            setattr(StageRunner, name, compute)


def _with_lock(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def wait_and_compute(*args: Any, **kwargs: Any) -> Any:
        with _ONE_AT_A_TIME:
            return compute(*args, **kwargs)

    return wait_and_compute
