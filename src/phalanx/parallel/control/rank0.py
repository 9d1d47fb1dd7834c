"""Rank 0 decides the next operation, and tells the others in one short message each time."""

import contextlib
import enum
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from phalanx.checkpoint import WrittenPieces
from phalanx.data import IGNORE, OF_ATTENTION, Batch
from phalanx.engine import NO_EXTRAS, NO_LIMITS, StepLimits
from phalanx.errors import ConfigError, FailedBatchError, PeerLostError
from phalanx.objectives import ExtraRows, Objective
from phalanx.parallel.control.local_ranks import LocalRanks
from phalanx.parallel.control.rank_trainer import AppliedStep
from phalanx.parallel.control.saving import RankSaver
from phalanx.telemetry import PhaseTimer

_PATIENCE_S = 3.0
"""A broken connection is seen before the process at its other end is."""
_GLOO, _LONG = "gloo", 300


class RankCommand(enum.IntEnum):
    """A command of rank 0: what all ranks do next."""

    STEP = 1
    EVALUATE = 2
    COLLECT = 3
    LOAD = 4
    END = 5
    DUPLICATE = 6
    WRITE = 7


class RankWork(Protocol):
    """The work of each rank on rank 0's orders; `RankTrainer` is one, and documents the calls."""

    timer: PhaseTimer

    @property
    def objective(self) -> Objective:
        """The objective, with all extra rows of a batch; the same on every rank."""

    @property
    def num_stages(self) -> int:
        """Parts in which the state is collected and loaded."""

    def train_step(
        self,
        step: int,
        ids: Tensor,
        labels: Tensor,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
        limits: StepLimits = NO_LIMITS,
    ) -> AppliedStep:
        """Run one optimizer step on a whole batch."""

    def evaluate_batch(
        self, ids: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> tuple[float, int]:
        """Summed loss and number of targets."""

    def collect_stage(self, stage: int) -> dict[str, Tensor]:
        """Bring one stage's whole tensors to rank 0."""

    def load_stage(self, num_steps: int, stage: int, tensors: dict[str, Tensor] | None) -> None:
        """Take one stage's state from rank 0."""

    def tensor_names(self, stage: int) -> list[str]:
        """Names of a stage's tensors."""


class Controller:
    """The domain as rank 0 sees it: each call is carried out by all ranks together.

    Args:
        member: Rank 0's own part.
        ranks: Children that are the other ranks; None where an engine started them.
        saving: Brings copies of the state here while training goes on; None without such saving.
    """

    def __init__(self, member: RankWork, ranks: LocalRanks | None, saving: RankSaver | None = None) -> None:
        self._member = member
        self._ranks = ranks
        self._saving = saving

    @property
    def timer(self) -> PhaseTimer:
        """The timer of rank 0."""
        return self._member.timer

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self._member.num_stages

    def run_step(
        self,
        step: int,
        ids: Tensor,
        labels: Tensor,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
        limits: StepLimits = NO_LIMITS,
    ) -> AppliedStep:
        """Run one optimizer step.

        Args:
            step: Number of the step, from 0.
            ids: int64 ``[batch, seq]``.
            labels: Next tokens, ``[batch, seq]``.
            extras: More rows of the whole batch, as the objective reads them.

        Raises:
            FailedBatchError: Loss or gradient is not finite, or a spike by the limits; nothing was updated.
        """
        # checked first: an error must not leave the others waiting
        self._member.objective.check_extras(extras, *ids.shape)
        with self._all_there():
            _tell_ranks(RankCommand.STEP, step, *ids.shape)
            with self._member.timer.time_phase("batch"):
                _share_batch(ids, labels)
                _share_extras(extras)
                _share_limits(limits)
            return self._member.train_step(step, ids, labels, extras, limits)

    def evaluate_on_ranks(
        self, ids: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> tuple[float, int]:
        """Summed loss and number of targets of a batch with a multiple of dp rows.

        Args:
            ids: int64 ``[batch, seq]``.
            labels: Next tokens, ``[batch, seq]``.
            extras: The rows that attention reads, where it reads any.
        """
        Objective(extras=_of_attention(self._member)).check_extras(extras, *ids.shape)
        with self._all_there():
            _tell_ranks(RankCommand.EVALUATE, 0, *ids.shape)
            _share_batch(ids, labels)
            _share_extras(extras)
            return self._member.evaluate_batch(ids, labels, extras)

    def sum_losses(self, batches: Iterable[Batch], num_copies: int) -> tuple[float, int]:
        """Return the summed loss and the number of targets of batches of any size.

        Args:
            num_copies: Copies that share a batch: each gets as many rows, so some of those have no targets.
        """
        total, count = 0.0, 0
        for batch in batches:
            missing = -len(batch.indices) % num_copies
            ids = functional.pad(batch.input_ids, (0, 0, 0, missing))
            labels = functional.pad(batch.labels, (0, 0, 0, missing), value=IGNORE)
            # a padded row has no targets, so any values do for what attention reads of it: those of the last row
            extras = {
                name: torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])
                for name, rows in batch.extras.items()
                if name in OF_ATTENTION
            }
            loss, targets = self.evaluate_on_ranks(ids, labels, extras)
            total, count = total + loss, count + targets
        return total, count

    def collect_from_ranks(self, stage: int) -> dict[str, Tensor]:
        """One stage's whole state by name: ``weight/...`` and moments."""
        with self._all_there():
            _tell_ranks(RankCommand.COLLECT, stage)
            return self._member.collect_stage(stage)

    def duplicate_state(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Have all ranks copy their state as it is now.

        Returns:
            Stages with their whole tensors, as `collect_from_ranks` returns them. Some thread must iterate to the end
            before the next copy is asked for; iterating ends with a `CheckpointError` if a rank is lost.
        """
        if self._saving is None:
            raise ConfigError("parallel: nothing was set up for checkpoints beside the training")
        with self._all_there():
            _tell_ranks(RankCommand.DUPLICATE)
            self._saving.copy_contribution()
        return self._saving.receive_state()

    def write_pieces(self, folder: Path, num_steps: int) -> Callable[[], WrittenPieces]:
        """Have all ranks copy their state as it is now, and each write its own part to `folder`.

        Returns:
            A function that waits until all have; any thread may call it, and one must, before the next copy is asked
            for. It raises a `CheckpointError` where a rank is lost or cannot write.
        """
        saving = self._saving
        if saving is None:
            raise ConfigError("parallel: nothing was set up for checkpoints that ranks write")
        path = torch.frombuffer(bytearray(os.fsencode(folder)), dtype=torch.uint8)
        with self._all_there():
            _tell_ranks(RankCommand.WRITE, num_steps, len(path))
            dist.broadcast(path, src=0)
            saving.copy_contribution()
        return lambda: saving.gather_pieces(folder, num_steps)

    def load_stages(self, num_steps: int, read: Callable[[str], Tensor]) -> None:
        """Give all ranks a state, whatever layout it was saved under.

        Args:
            num_steps: Steps that the optimizer has made.
            read: Function from a name, as in `collect_from_ranks`, to the whole tensor.
        """
        for stage in range(self.num_stages):
            # read first: an error must not leave the others waiting
            tensors = {name: read(name) for name in self._member.tensor_names(stage)}
            with self._all_there():
                _tell_ranks(RankCommand.LOAD, num_steps, stage)
                self._member.load_stage(num_steps, stage, tensors)

    def end_run(self) -> None:
        """Tell all ranks that the run is over, and wait until they know."""
        with self._all_there():
            _tell_ranks(RankCommand.END)
            dist.barrier()
        if self._ranks is not None:
            self._ranks.close()

    @contextlib.contextmanager
    def _all_there(self) -> Iterator[None]:
        """Say which rank was lost where torch only knows that a connection broke."""
        try:
            yield
        except RuntimeError as exc:
            lost = None if self._ranks is None else self._ranks.find_lost(_PATIENCE_S)
            lost = lost or _lost_connection(exc)
            if lost is None:
                raise
            raise lost from exc


def follow_rank0(member: RankWork, saving: RankSaver | None = None) -> None:
    """Carry out what rank 0 says until the run is over."""
    try:
        _follow_orders(member, saving)
    except RuntimeError as exc:
        lost = _lost_connection(exc)
        if lost is None:
            raise
        raise lost from exc


def _follow_orders(member: RankWork, saving: RankSaver | None) -> None:
    while True:
        message = torch.zeros(4, dtype=torch.int64)
        dist.broadcast(message, src=0)
        heard: list[int] = message.tolist()
        order, *numbers = heard
        if order == RankCommand.STEP:
            ids, labels = _take_batch(numbers[1], numbers[2])
            extras = _take_extras(member.objective.extras, numbers[1], numbers[2])
            limits = _share_limits(NO_LIMITS)
            with contextlib.suppress(FailedBatchError):
                # rank 0 has come to the same conclusion
                member.train_step(numbers[0], ids, labels, extras, limits)
            member.timer.take_wall()
        elif order == RankCommand.EVALUATE:
            ids, labels = _take_batch(numbers[1], numbers[2])
            member.evaluate_batch(ids, labels, _take_extras(_of_attention(member), numbers[1], numbers[2]))
        elif order == RankCommand.COLLECT:
            member.collect_stage(numbers[0])
        elif order == RankCommand.LOAD:
            member.load_stage(numbers[0], numbers[1], None)
        elif order == RankCommand.DUPLICATE and saving is not None:
            saving.copy_contribution()
            saving.begin_sending()
        elif order == RankCommand.WRITE and saving is not None:
            path = torch.empty(numbers[1], dtype=torch.uint8)
            dist.broadcast(path, src=0)
            saving.copy_contribution()
            saving.begin_writing(Path(os.fsdecode(path.numpy().tobytes())), numbers[0])
        else:
            if saving is not None:
                saving.wait_until_sent()
            dist.barrier()
            return


def _lost_connection(exc: RuntimeError) -> PeerLostError | None:
    """Return what to raise for an error of torch's that says that a rank is gone; None for other errors."""
    message = str(exc)
    # gloo says so in an error of the most general kind
    if not (isinstance(exc, dist.DistError) or _GLOO in message):
        return None
    return PeerLostError(f"a rank was lost: {message.splitlines()[0][:_LONG]}; continue with --resume")


def _tell_ranks(order: RankCommand, *numbers: int) -> None:
    message = [int(order), *numbers]
    dist.broadcast(torch.tensor(message + [0] * (4 - len(message))), src=0)


def _share_batch(ids: Tensor, labels: Tensor) -> None:
    dist.broadcast(torch.stack((ids, labels)), src=0)


def _take_batch(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    tokens_and_labels = torch.zeros((2, rows, tokens), dtype=torch.int64)
    dist.broadcast(tokens_and_labels, src=0)
    return tokens_and_labels[0], tokens_and_labels[1]


def _share_extras(extras: Mapping[str, Tensor]) -> None:
    for name in sorted(extras):
        dist.broadcast(extras[name].contiguous(), src=0)


def _share_limits(limits: StepLimits) -> StepLimits:
    """Return the limits of rank 0, on every rank."""
    numbers = torch.tensor([limits.max_loss, limits.max_norm, limits.rate_factor], dtype=torch.float64)
    dist.broadcast(numbers, src=0)
    return StepLimits(*numbers.tolist())


def _of_attention(member: RankWork) -> dict[str, ExtraRows]:
    """The rows that a batch brings beside ids and labels where it is only measured."""
    return {name: kind for name, kind in member.objective.extras.items() if name in OF_ATTENTION}


def _take_extras(kinds: Mapping[str, ExtraRows], rows: int, tokens: int) -> dict[str, Tensor]:
    extras = {}
    for name, kind in sorted(kinds.items()):
        extras[name] = torch.zeros(kind.rows_shape(rows, tokens), dtype=getattr(torch, kind.dtype))
        dist.broadcast(extras[name], src=0)
    return extras
