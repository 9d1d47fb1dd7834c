"""The turns of clients of other owners: inside the enclave, which are ready; at a client, its answers to them."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from phalanx.errors import DataError, FrameError
from phalanx.security.crypto import Peer
from phalanx.split.channel import turn_messages as ask
from phalanx.split.config import SplitConfig
from phalanx.split.handshake.party import EnclavePeer
from phalanx.split.roles.client import Feedback
from phalanx.split.roles.client_end import ClientEnd

_QUIET_S = 10.0
"""Seconds without a measured row after which the owner is told which clients a turn waits for."""
_COUNTED = ("true", "found", "right")
"""Of each class: texts of it, texts that were taken for it, and right ones."""
_LONG_S = 60.0
"""Seconds of a turn after which the owner is told in any case: a client may measure a row a second for ever."""


class ClientTurns:
    """The turns of one session: it takes messages and figures, and reports complete turns.

    Args:
        model: Digest of the enclave's copy of the model's files; a client with another copy is refused.
        counts: Whether the held-out texts of a client are in the sums; asked when all of a turn are measured.
        num_pair_sums: Number of sums over pairs in a measurement.
    """

    def __init__(
        self,
        clients: Sequence[str],
        model: str,
        num_classes: int,
        clock: Callable[[], float] = time.monotonic,
        counts: Callable[[str], bool] = lambda client: True,
        num_pair_sums: int = 0,
    ) -> None:
        self._clients, self._model, self._num_classes = tuple(clients), model, num_classes
        self._num_pair_sums = num_pair_sums
        self._counts_in = counts
        self._ready: dict[str, ask.ClientReady] = {}
        self._turn: ask.ClientTurn | None = None
        self._waits_for: set[str] = set()
        self._sums: dict[str, _ClientSums] = {}
        self._finished: tuple[ask.ClientTurn, list[float]] | None = None
        self._clock = clock
        self._moved_at = self._told_at = clock()
        self._is_concluding = False

    @property
    def is_ready(self) -> bool:
        """Whether every client is."""
        return len(self._ready) == len(self._clients)

    @property
    def data_commitments(self) -> Mapping[str, str]:
        """Of each client's data, in the order of their turns."""
        return {name: self._ready[name].data for name in self._clients if name in self._ready}

    def note_ready(self, client: str, message: ask.ClientReady) -> None:
        """Take a client's word that it is ready, once: the owner waits for word of all clients once as well."""
        if client in self._ready:
            raise FrameError(f"{client}: already reported ready and cannot change it")
        if message.model != self._model:
            raise DataError(f"{client}: its model files differ from the enclave's; give all parties the same files")
        if any(other.tokenizer != message.tokenizer for other in self._ready.values()):
            raise DataError(f"{client}: its tokenizer differs from the other clients'; give all parties the same one")
        self._ready[client] = message

    def begin_turn(self, message: ask.ClientTurn, num_steps: int) -> None:
        """Begin a turn."""
        if not self.is_ready or self._waits_for or self._is_concluding or message.step != num_steps:
            raise FrameError(
                f"turn of step {message.step}: the enclave is at step {num_steps}, {len(self._ready)} of "
                f"{len(self._clients)} clients are ready, and {len(self._waits_for)} have a turn to finish"
            )
        self._turn = message
        self._wait_for_all()
        self._sums.clear()

    def check_turn(self, client: str, what: str) -> None:
        """Refuse a microbatch that no turn asked this client for."""
        if self._turn is None or self._turn.what != what or client not in self._waits_for:
            raise FrameError(f"{client}: was asked for no microbatch of {what!r}")

    def note_step(self, norm: float, losses: Sequence[tuple[float, int]]) -> None:
        """Record the result of a step: its turn is complete, with norm, summed loss and targets."""
        self._complete_turn("train", [norm, sum(loss for loss, _ in losses), float(sum(count for _, count in losses))])

    def note_measurement(
        self,
        client: str,
        loss: float,
        targets: int,
        found: Sequence[int],
        true: Sequence[int],
        pair_sums: Sequence[float] = (),
    ) -> None:
        """Take what some held-out rows of a client came to."""
        sums = self._sums.setdefault(client, _ClientSums())
        sums.losses.append(loss)
        sums.pairs.append(tuple(pair_sums))
        sums.targets += targets
        for predicted_class, other in zip(found, true, strict=True):
            sums.classes["found", predicted_class] += 1
            sums.classes["true", other] += 1
            sums.classes["right", predicted_class] += predicted_class == other
        self._moved_at = self._clock()

    def note_done(self, client: str, message: ask.TurnDone) -> None:
        """Take a client's word that its held-out texts are measured.

        Where it was the last one the turn is complete, with summed loss, targets, then for each class texts of it,
        texts taken for it, and right ones, of the clients that count by then.
        """
        self.check_turn(client, "held_out")
        if self._turn is None or message.step != self._turn.step:
            raise FrameError(f"{client}: has measured at step {message.step}, which is not that of the turn")
        self._waits_for.discard(client)
        if not self._waits_for:
            self._complete_turn("held_out", self._sum_totals())

    def pop_finished_turn(self) -> tuple[ask.ClientTurn, list[float]] | None:
        """Hand out, once, the complete turn and its result."""
        turn, self._finished = self._finished, None
        return turn

    def begin_conclusion(self) -> None:
        """Begin the end."""
        if self._waits_for:
            raise FrameError(f"the end: {len(self._waits_for)} clients have a turn to finish")
        self._is_concluding = True
        self._wait_for_all()

    def note_concluded(self, client: str) -> bool:
        """Take a client's word that it has compared; True where it was the last one."""
        if not self._is_concluding or client not in self._waits_for:
            raise FrameError(f"{client}: was not asked to conclude")
        self._waits_for.discard(client)
        return not self._waits_for

    def overdue_clients(self, due: str) -> tuple[str, ...]:
        """Return the clients that a turn waits for where it is time to tell the owner, else none; ask often.

        It is time when nothing was measured for a while, and when the turn as a whole takes long: neither a frame that
        is refused nor a row that is measured now and then keeps a client from being named.

        Args:
            due: The client that the step under way waits for.
        """
        now = self._clock()
        if not self._waits_for or (now - self._moved_at < _QUIET_S and now - self._told_at < _LONG_S):
            return ()
        self._moved_at = self._told_at = now
        if self._turn is not None and self._turn.what == "train" and not self._is_concluding:
            return (due,)
        return tuple(name for name in self._clients if name in self._waits_for)

    def _wait_for_all(self) -> None:
        self._waits_for = set(self._clients)
        self._moved_at = self._told_at = self._clock()

    def _complete_turn(self, what: str, numbers: list[float]) -> None:
        if self._turn is None or self._turn.what != what:
            raise FrameError(f"no turn of {what!r} is under way")
        self._finished = (self._turn, numbers)
        self._turn = None
        self._waits_for.clear()

    def _sum_totals(self) -> list[float]:
        sums = [client_sums for name, client_sums in self._sums.items() if self._counts_in(name)]
        loss = _sum_exactly(loss for client_sums in sums for loss in client_sums.losses)
        counts = [
            sum(client_sums.classes[kind, label] for client_sums in sums)
            for label in range(self._num_classes)
            for kind in _COUNTED
        ]
        pair_sums = [
            _sum_exactly(pairs[place] for client_sums in sums for pairs in client_sums.pairs)
            for place in range(self._num_pair_sums)
        ]
        return [loss, *map(float, (sum(client_sums.targets for client_sums in sums), *counts)), *pair_sums]


def _sum_exactly(numbers: Iterable[float]) -> float:
    """Sum exactly, so that the order in which clients have measured does not matter; NaN where there is no sum."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):
        # a client says infinity of one pair and minus infinity of another
        return math.nan


@dataclass
class _ClientSums:
    """Held-out sums of one client in a turn; class counts by kind and label."""

    losses: list[float] = field(default_factory=list)
    targets: int = 0
    pairs: list[tuple[float, ...]] = field(default_factory=list)
    classes: Counter[tuple[str, int]] = field(default_factory=Counter)


Rows = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Ids, labels, and further rows by name, of some rows."""


class ClientRows(Protocol):
    """The texts of one client."""

    @property
    def own_microbatches(self) -> Sequence[int]:
        """This client's microbatches of a step."""

    def draw_rows(self, draw: int) -> Sequence[Rows]:
        """The rows of a draw, an entry for each microbatch of this client."""

    def held_out(self) -> Iterator[Rows]:
        """All held-out rows, some at a time."""


class TurnTaker:
    """The loop of a client: it takes the turns that the owner asks for, until the owner concludes.

    Args:
        split: The section of the run file.
        steps: Steps of the run; turns of later steps are refused.
        tell: Takes a step and the feedback on this client's microbatches.

    Guarantees:
        What it is asked for is which of its texts to train on and when, nothing else: there is no message that asks
        for a text, and what leaves is sealed for the enclave that this client has appraised.
    """

    def __init__(
        self,
        split: SplitConfig,
        steps: int,
        party: EnclavePeer,
        end: ClientEnd,
        texts: ClientRows,
        tell: Callable[[int, Feedback], None] = lambda step, told: None,
    ) -> None:
        self._split, self._steps = split, steps
        self._party, self._end, self._texts, self._tell = party, end, texts, tell

    def take_turns(self) -> None:
        """Take turns until the owner concludes."""
        while True:
            message, _ = self._party.connection.await_one_of((ask.ClientTurn, ask.Conclude))
            if not isinstance(message, ask.ClientTurn):
                return
            self._take_turn(message)

    def conclude_session(self, enclave: Peer) -> tuple[bytes, bytes] | None:
        """Compare transcripts with the enclave, log the result, and return both statements."""
        statements = self._party.compare_transcripts(enclave)
        self._party.connection.send_message(ask.ConcludeReply())
        self._party.connection.flush_messages()
        return statements

    def _take_turn(self, turn: ask.ClientTurn) -> None:
        if turn.step > self._steps:
            raise FrameError(f"a turn of step {turn.step} is asked for, the run has {self._steps}")
        now = turn.what == "train" and self._split.reattests_at(turn.step)
        self._party.check_trust(every_s=self._split.reattest_s, now=now)
        if turn.what == "train":
            mine = self._texts.own_microbatches
            for number, rows in zip(mine, self._texts.draw_rows(turn.draw), strict=True):
                self._end.send_microbatch("train", turn.step, number, *rows)
            self._tell(turn.step, self._end.await_losses(turn.step, mine))
        else:
            self._measure_turn(turn.step)

    def _measure_turn(self, step: int) -> None:
        for number, (ids, labels, extras) in enumerate(self._texts.held_out()):
            self._end.send_microbatch("held_out", step, number, ids, labels, extras)
            self._end.await_scores(step, number, ids.shape[0])
        self._party.connection.send_message(ask.TurnDone(step=step))
