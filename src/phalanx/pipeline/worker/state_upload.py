"""A copy of a stage's state on its way to the owner's checkpoint: made at once, sent when nothing else is to do."""

from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

from torch import Tensor

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.messages import Bulk, FetchBulk
from phalanx.pipeline.protocol.tensor_stream import Post, parts


class _Parcel(NamedTuple):
    receiver: str
    about: FetchBulk
    rest: Generator[None]


class StateUploads:
    """The uploads of states that one party still has to make; at most one copy of each stage is kept."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._waiting: dict[int, _Parcel] = {}

    def put(self, receiver: str, about: FetchBulk, state: Callable[[], Mapping[str, Tensor]], num_steps: int) -> None:
        """Copy a state and keep it for sending; an earlier copy of the stage is let go of.

        Raises:
            FrameError: The state is not of the step that was asked for.
        """
        self._waiting.pop(about.stage, None)
        if num_steps != about.step:
            raise FrameError(f"stage {about.stage}: asked for the state of step {about.step}, it is at {num_steps}")
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in state().items()}
        self._waiting[about.stage] = _Parcel(receiver, about, self._send(receiver, about, tensors))

    def send_next(self) -> bool:
        """Send one part of one copy; False when nothing waits."""
        for stage, parcel in self._waiting.items():
            if next(parcel.rest, self) is self:
                del self._waiting[stage]
            return True
        return False

    def clear(self) -> None:
        """Let go of everything: roles have changed."""
        self._waiting.clear()

    def _send(self, receiver: str, about: FetchBulk, tensors: Mapping[str, Tensor]) -> Generator[None]:
        for offset, total, part in parts(tensors):
            place = {"epoch": about.epoch, "stage": about.stage, "step": about.step}
            message = Bulk.model_validate({**place, "purpose": about.purpose, "offset": offset, "total": total})
            self._post(receiver, message, part)
            yield
