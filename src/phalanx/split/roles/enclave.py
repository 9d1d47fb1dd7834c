"""The enclave's work, over any transport of its frames: microbatches in their order, one step, losses back."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from phalanx.errors import FailedBatchError, FrameError
from phalanx.objectives import IGNORE
from phalanx.security.seal import ReleaseGate
from phalanx.split.admission.standings import ClientStandings
from phalanx.split.channel.client_order import client_of, microbatches_of
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.link import Frame, FrameLink, PackedFrame, costs_of
from phalanx.split.channel.tensor_kinds import TensorKinds, What
from phalanx.split.training.trainer import SplitTrainer

Replies = Mapping[str, PackedFrame]
"""Frames for clients, by name."""

_MAX_MEASURED_ROWS = 4096


class Tally(Protocol):
    """What sums over all clients."""

    def note_step(self, norm: float, losses: Sequence[tuple[float, int]]) -> object:
        """Take a step's norm, and summed loss and targets of each of its microbatches."""

    def note_measurement(
        self,
        client: str,
        loss: float,
        targets: int,
        found: Sequence[int],
        true: Sequence[int],
        pair_sums: Sequence[float] = (),
    ) -> object:
        """Take summed loss and targets of a client's held-out rows, the class found for each, and its own.

        Args:
            pair_sums: Sums over pairs, which `HeldOutScores` describes.
        """


class ClientAdmission(Protocol):
    """What decides which clients count."""

    @property
    def counted_clients(self) -> Collection[str]:
        """The clients that the last step was made of."""

    @property
    def client_standings(self) -> ClientStandings:
        """Of the clients; they take what held-out rows come to."""


class Enclave:
    """The enclave takes frames of all clients and trains one set of adapters.

    Args:
        microbatches: Microbatches of a step; clients take turns.
        clients: Party names, in the order of their turns.
        gate: Counts the clients that have contributed; None where nothing is ever released.

    Attributes:
        tally: Takes what steps and measurements come to, for an owner that sees no client's; None where none does.
        admission: Decides which clients count; None where all do.

    Guarantees:
        A frame that is not due changes nothing, and the due one is taken afterwards. Losses of a microbatch go to its
        sender, and to no other client.
    """

    def __init__(
        self,
        trainer: SplitTrainer,
        kinds: TensorKinds,
        microbatches: int,
        clients: Sequence[str],
        gate: ReleaseGate | None = None,
    ) -> None:
        self.trainer, self.gate = trainer, gate
        self._kinds, self._microbatches, self._clients = kinds, microbatches, tuple(clients)
        self.tally: Tally | None = None
        self.admission: ClientAdmission | None = None
        self._links: dict[str, FrameLink] = {}
        self._parts: dict[tuple[str, What], tuple[torch.Tensor, ...]] = {}

    def connect_client(self, client: str, link: FrameLink) -> None:
        """Take a client's link; frames over an earlier link are void."""
        if client not in self._clients:
            raise FrameError(f"{client}: is not a client of this run")
        earlier = self._links.get(client)
        if earlier is not None:
            earlier.close()
        self._links[client] = link
        self.restart_step()

    @property
    def due_microbatch(self) -> tuple[str, int]:
        """The client and the microbatch that are due in the step under way."""
        number = self.trainer.num_learned
        return client_of(number, self._clients), number

    @property
    def link_costs(self) -> Costs:
        """CPU time that the clients' links have cost so far."""
        return costs_of(self._links.values())

    @property
    def crypto_seconds(self) -> float:
        """CPU time spent on sealing and opening so far, digests and buffers included."""
        return self.link_costs.link_s

    def restart_step(self) -> None:
        """Give up the step that is under way; its microbatches are learned again."""
        self.trainer.drop_microbatches()
        self._parts.clear()

    def take_frame(
        self, client: str, what: What, microbatch: int, rows: int, frame: Frame, digest: str = ""
    ) -> Replies:
        """Take the next frame of a client: activations, labels, extra rows by name.

        Args:
            client: The client of the link that it came over.
            what: Whether it is to be learned from, as the carrier says; the frame must agree.
            microbatch: Index that the carrier claims; the frame must agree.
            rows: Rows that the carrier claims; the frame must agree.
            digest: Digest of the frame; see `FrameLink.unpack_tensor`.

        Returns:
            Feedback for clients, where this frame completes a step, or a measurement.

        Raises:
            SealError: It is not the frame that is due; nothing has changed.
            FrameError: The same, of a link that seals nothing, or for a turn that is not this client's.
        """
        self._check_turn(client, what, microbatch, rows)
        link, step = self._require_link(client), self.trainer.num_steps
        kinds, taken = self._kinds.microbatch_kinds(what, rows), self._parts.get((client, what), ())
        taken = (*taken, link.unpack_tensor(frame, kinds[len(taken)], step, microbatch, digest))
        if len(taken) < len(kinds):
            self._parts[client, what] = taken
            return {}
        self._parts.pop((client, what), None)
        hidden, labels, *more = taken
        extras = dict(zip(self._kinds.extra_names(what), more, strict=True))
        if what == "held_out":
            loss, targets, answers, pair_sums = self.trainer.measure_microbatch(hidden, labels, extras)
            if self.admission is not None:
                # a pair without a difference spoils the sums as a text without a loss does
                is_number = all(map(math.isfinite, pair_sums))
                self.admission.client_standings.note_measurement(client, loss if is_number else math.nan, targets)
            if self.tally is not None:
                # a language model answers no row
                true = labels[labels != IGNORE].tolist() if answers else ()
                self.tally.note_measurement(client, loss, targets, answers, true, pair_sums)
            numbers = [math.nan, loss, targets, *answers, *pair_sums]
            return {client: self._pack_result(client, what, microbatch, numbers, step)}
        self.trainer.learn_microbatch(hidden, labels, extras)
        return {} if self.trainer.num_learned < self._microbatches else self._finish_step(rows)

    def counts_in_sums(self, client: str) -> bool:
        """Whether sums over all clients contain the last measurement of this client."""
        return self.admission is None or self.admission.client_standings.is_measured(client)

    def link_of(self, client: str) -> FrameLink:
        """A client's link, for what goes beside the steps."""
        return self._require_link(client)

    def close(self) -> None:
        """Forget all keys."""
        for link in self._links.values():
            link.close()

    def _finish_step(self, rows: int) -> Replies:
        """Take the step, and tell every client its own losses."""
        step = self.trainer.num_steps
        try:
            norm = self.trainer.step()
        except FailedBatchError:
            # said by a norm that is no number: the other ends know no exceptions of this process
            norm = math.nan
        learned, replies = self.trainer.step_losses, {}
        if self.tally is not None:
            self.tally.note_step(norm, learned)
        for client in self._clients:
            mine = microbatches_of(client, self._microbatches, self._clients)
            if not mine:
                continue
            numbers = [norm, *(number for index in mine for number in learned[index])]
            replies[client] = self._pack_result(client, "train", mine[-1], numbers, step)
            has_counted = self.admission is None or client in self.admission.counted_clients
            if self.gate is not None and math.isfinite(norm) and has_counted:
                self.gate.note_contribution(client, rows * len(mine))
        return replies

    def _pack_result(
        self, client: str, what: What, microbatch: int, numbers: Sequence[float], step: int
    ) -> PackedFrame:
        kind = self._kinds.result_kind(what, len(numbers))
        return self._require_link(client).pack_tensor(
            kind, step, microbatch, torch.tensor(numbers, dtype=torch.float64)
        )

    def _check_turn(self, client: str, what: What, microbatch: int, rows: int) -> None:
        if what == "train":
            if (client, microbatch) != self.due_microbatch or rows != self._kinds.rows:
                raise FrameError(
                    f"{client}: microbatch {microbatch} of {rows} rows came, due is {self.due_microbatch[1]} of "
                    f"{self.due_microbatch[0]} with {self._kinds.rows}"
                )
        elif self.trainer.num_learned or not 1 <= rows <= _MAX_MEASURED_ROWS or microbatch < 0:
            raise FrameError(f"{client}: a measurement of {rows} rows came inside of a step, or is none")

    def _require_link(self, client: str) -> FrameLink:
        link = self._links.get(client)
        if link is None:
            raise FrameError(f"{client}: has not met the enclave yet")
        return link
