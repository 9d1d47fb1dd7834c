"""The standings of clients in an enclave: which were refused, for what, and which are shut out; no tensors."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pydantic import Field, ValidationError

from phalanx.config import StrictModel
from phalanx.errors import CheckpointError
from phalanx.split.admission.config import ClientAdmissionConfig, RefusalReason

_FEWEST_COMPARED = 3
"""Clients among which one can be told from the others."""
_NO_NUMBER = 1e300
"""Replaces a loss that is not finite, in the metadata."""


@dataclass(frozen=True)
class ClientRefusal:
    """The refusal of one client's microbatches.

    Attributes:
        step: The step in which they do not count; for a held-out loss, the number of finished steps.
        figure: The measured value; NaN where it was no number.
        is_excluded: Whether the client is shut out with it.
    """

    client: str
    step: int
    reason: RefusalReason
    figure: float
    bound: float
    is_excluded: bool


class _StandingsState(StrictModel):
    """What a sealed state keeps of standings."""

    in_a_row: dict[str, dict[RefusalReason, int]] = Field(default={})
    excluded: dict[str, RefusalReason] = Field(default={})
    suspended: tuple[str, ...] = ()
    measured: dict[str, tuple[float, int]] = Field(default={})


class ClientStandings:
    """The standings of one run's clients."""

    def __init__(self, clients: Sequence[str], config: ClientAdmissionConfig) -> None:
        self._clients, self._config = tuple(clients), config
        self._in_a_row: dict[str, dict[RefusalReason, int]] = {name: {} for name in clients}
        self._excluded: dict[str, RefusalReason] = {}
        self._suspended: set[str] = set()
        self._measured: dict[str, tuple[float, int]] = {}
        self._new_refusals: list[ClientRefusal] = []

    @property
    def excluded_clients(self) -> Mapping[str, RefusalReason]:
        """Clients that are shut out, with the reasons."""
        return self._excluded

    def is_counted(self, client: str) -> bool:
        """Whether a client's microbatches are learned at all."""
        return client not in self._excluded and client not in self._suspended

    def judge_norms(self, step: int, norms: Mapping[str, float]) -> list[str]:
        """Judge the norms of clients' gradients of a step; return the clients that pass."""
        passed = []
        for client, norm in norms.items():
            max_norm = math.inf if self._config.max_norm is None else self._config.max_norm
            if not self._note_result(client, step, "not_finite", norm, math.inf, is_fine=math.isfinite(norm)):
                continue
            if self._note_result(client, step, "over_norm", norm, max_norm, is_fine=norm <= max_norm):
                passed.append(client)
        return passed

    def judge_distances(self, step: int, distances: Mapping[str, float]) -> None:
        """Judge clients' gradients by their distance to the robust result: far ones count, but are held against them.

        A client that is far again and again is shut out, until as many are as may lie: data of clients differ, and
        one of them is always the farthest.
        """
        if len(distances) < _FEWEST_COMPARED:
            return
        bound = self._config.far * statistics.median_low(distances.values())
        for client, distance in distances.items():
            if len(self._excluded) < self._config.byzantine:
                self._note_result(client, step, "far", distance, bound, is_fine=distance <= bound)

    def note_measurement(self, client: str, loss: float, targets: int) -> None:
        """Take what some held-out rows of a client came to."""
        total, count = self._measured.get(client, (0.0, 0))
        # a loss that is no number is one that is too large, and has a place in canonical metadata
        self._measured[client] = (total + (loss if math.isfinite(loss) else _NO_NUMBER), count + targets)

    def is_measured(self, client: str) -> bool:
        """Whether sums over all clients contain this client's measurements since the last step.

        They have not where it is shut out, where the loss of one of its texts is no number, and where its loss is one
        that `judge_measurements` refuses: weights that are chosen by such a sum would be chosen by the client.
        """
        total, _ = self._measured.get(client, (0.0, 0))
        if client in self._excluded or total >= _NO_NUMBER:
            return False
        compared = self._mean_losses()
        return client not in compared or compared[client] <= self._loss_bound(compared)

    def judge_measurements(self, step: int) -> None:
        """Judge the held-out losses of the last measurement, if there was one since the last step."""
        for client, (total, _) in self._measured.items():
            if total >= _NO_NUMBER and client not in self._excluded:
                # told, and held against it by what it trains on: the steps in a row are those of gradients
                self._new_refusals.append(
                    ClientRefusal(client, step, "not_finite", math.inf, math.inf, is_excluded=False)
                )
        compared = self._mean_losses()
        self._measured.clear()
        if self._config.held_out_factor is None or not compared:
            return
        # a client that has nothing measured is cleared by nothing
        self._suspended -= compared.keys()
        if len(compared) < _FEWEST_COMPARED:
            return
        bound = self._loss_bound(compared)
        for client, loss in compared.items():
            if not self._note_result(client, step, "held_out_loss", loss, bound, is_fine=loss <= bound):
                self._suspended.add(client)

    def pop_refusals(self) -> list[ClientRefusal]:
        """Hand out, once, the refusals since the last call."""
        refusals, self._new_refusals = self._new_refusals, []
        return refusals

    def dump_standings(self) -> dict[str, object]:
        """All of it as JSON data, for a sealed state."""
        return _StandingsState(
            in_a_row={name: dict(counts) for name, counts in self._in_a_row.items()},
            excluded=dict(self._excluded),
            suspended=tuple(sorted(self._suspended)),
            measured=dict(self._measured),
        ).model_dump(mode="json")

    def restore_standings(self, books: object) -> None:
        """Load metadata."""
        try:
            state = _StandingsState.model_validate(books, strict=False)
        except ValidationError as exc:
            raise CheckpointError(
                "sealed state: has no standings of clients, and [split.admission] keeps them"
            ) from exc
        named = {*state.in_a_row, *state.excluded, *state.suspended, *state.measured}
        if not named <= set(self._clients):
            raise CheckpointError(f"sealed state: has standings of {sorted(named)[:5]}, which are not in this run")
        self._in_a_row = {name: dict(state.in_a_row.get(name, {})) for name in self._clients}
        self._excluded, self._suspended = dict(state.excluded), set(state.suspended)
        self._measured, self._new_refusals = dict(state.measured), []

    def _mean_losses(self) -> dict[str, float]:
        """The mean held-out loss of each client that was measured and is not shut out."""
        means = {name: total / count for name, (total, count) in self._measured.items() if count}
        return {name: loss for name, loss in means.items() if name not in self._excluded}

    def _loss_bound(self, compared: Mapping[str, float]) -> float:
        """What held-out losses may be; anything where too few clients are compared."""
        factor = self._config.held_out_factor
        if factor is None or len(compared) < _FEWEST_COMPARED:
            return math.inf
        return factor * statistics.median_low(compared.values())

    def _note_result(
        self, client: str, step: int, reason: RefusalReason, figure: float, bound: float, *, is_fine: bool
    ) -> bool:
        counts = self._in_a_row[client]
        if is_fine:
            counts.pop(reason, None)
            return True
        counts[reason] = counts.get(reason, 0) + 1
        is_out = counts[reason] >= self._config.patience
        if is_out:
            self._excluded[client] = reason
        self._new_refusals.append(ClientRefusal(client, step, reason, figure, bound, is_out))
        return False


def refusal_facts(refusal: ClientRefusal) -> dict[str, object]:
    """Return a refusal as JSON data, with null for numbers that are not finite."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(refusal).items()
    }
