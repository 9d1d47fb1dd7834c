"""A client: it has text, labels and the frozen front, and gets back nothing but losses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.engine import NO_EXTRAS
from phalanx.errors import DataError, FrameError
from phalanx.split.channel.link import Frame, FrameLink, PackedFrame
from phalanx.split.channel.tensor_kinds import TensorKinds, What
from phalanx.split.training.classification import HeldOutScores
from phalanx.split.training.parts import Front

_FIGURES = 3
"""Of a measurement: a norm that there is none of, loss, targets."""


@dataclass(frozen=True)
class PackedMicrobatch:
    """One microbatch as it leaves a client.

    Attributes:
        what: Whether it is learned from or only measured.
        frames: Activations, labels, extra rows by name.
    """

    what: What
    step: int
    microbatch: int
    rows: int
    frames: tuple[PackedFrame, ...]


@dataclass(frozen=True)
class Feedback:
    """The enclave's feedback on a client's microbatches.

    Attributes:
        norm: Gradient norm of the whole step; NaN where the step was not taken, and for measurements.
        losses: Summed loss and targets of each microbatch of this client, in order.
    """

    norm: float
    losses: tuple[tuple[float, int], ...]


class SplitClient:
    """One client.

    Args:
        front: May be shared by the clients of one process: it is frozen.
    """

    def __init__(self, name: str, front: Front, kinds: TensorKinds, link: FrameLink) -> None:
        self.name, self.link = name, link
        self._front, self._kinds = front, kinds

    def pack_microbatch(
        self,
        what: What,
        step: int,
        microbatch: int,
        ids: Tensor,
        labels: Tensor,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
    ) -> PackedMicrobatch:
        """Run the front on ids ``[rows, seq]`` and make the frames that leave; send them in order, repeat at will."""
        rows, kinds = ids.shape[0], self._kinds.microbatch_kinds(what, ids.shape[0])
        self._check_extras(what, extras)
        tensors = (self._front(ids), labels.contiguous(), *(extras[name].contiguous() for name in sorted(extras)))
        frames = tuple(
            self.link.pack_tensor(kind, step, microbatch, tensor) for kind, tensor in zip(kinds, tensors, strict=True)
        )
        return PackedMicrobatch(what, step, microbatch, rows, frames)

    def _check_extras(self, what: What, extras: Mapping[str, Tensor]) -> None:
        expected_extras = self._kinds.extra_names(what)
        if sorted(extras) != expected_extras:
            raise DataError(f"extras: the batch has {sorted(extras)}, the objective reads {expected_extras}")

    def read_feedback(self, frame: Frame, what: What, step: int, microbatch: int, count: int) -> Feedback:
        """Open the feedback on `count` microbatches, the last of which is `microbatch`."""
        numbers = self.link.unpack_tensor(
            frame, self._kinds.result_kind(what, 1 + 2 * count), step, microbatch
        ).tolist()
        targets = self._check_counts(numbers[2::2])
        return Feedback(numbers[0], tuple(zip(numbers[1::2], targets, strict=True)))

    def read_scores(self, frame: Frame, step: int, microbatch: int, rows: int) -> HeldOutScores:
        """Open what so many held-out rows came to; as `read` otherwise."""
        num_answers, num_sums = self._kinds.num_answers(rows), self._kinds.num_pair_sums
        kind = self._kinds.result_kind("held_out", _FIGURES + num_answers + num_sums)
        _, loss, targets, *more = self.link.unpack_tensor(frame, kind, step, microbatch).tolist()
        answers, pair_sums = more[:num_answers], more[num_answers:]
        # the first sum is a count, the second one of differences
        self._check_counts(pair_sums[:1])
        return HeldOutScores(
            loss, self._check_counts([targets])[0], tuple(self._check_counts(answers)), tuple(pair_sums)
        )

    def _check_counts(self, numbers: Sequence[float]) -> list[int]:
        if any(not (number >= 0 and number.is_integer()) for number in numbers):
            raise FrameError(f"{self.name}: the enclave counts {numbers[:5]}, which are no counts")
        return [int(number) for number in numbers]
