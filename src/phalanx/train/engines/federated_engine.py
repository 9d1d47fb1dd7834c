"""The loop's Engine over the sites of federated rounds: one step is one round."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.checkpoint import Checkpoint, Shard
from phalanx.data import Batch
from phalanx.engine import StepInputs, StepResult
from phalanx.errors import CheckpointError
from phalanx.federated.algorithms import Named
from phalanx.federated.local import SiteScores
from phalanx.federated.rounds.coordinator import RoundCoordinator
from phalanx.federated.rounds.journal import RoundRecord
from phalanx.federated.site_trainer import WholeModel
from phalanx.security.privacy import BudgetLedger, PrivacyConfig
from phalanx.telemetry import MetricsFile
from phalanx.train.batches.preferences import PreferenceMeasure
from phalanx.train.batches.samples import TextSample, TextSampler
from phalanx.train.batches.scores import Scores, Validation, loss_of
from phalanx.train.batches.validation import perplexity_of

_WEIGHT = "weight/"


class RoundRecorder(Protocol):
    """A recorder of round events and of a step's metrics."""

    figures: Mapping[str, float]

    def observe_event(self, kind: str, body: dict[str, object]) -> None:
        """Write an event to the audit log and print it for people."""


@dataclass(frozen=True)
class OwnerModel:
    """The owner's copy of the model, and its measures beside held-out rows.

    Attributes:
        pairs: Measure of held-out pairs; None where no pairs are learned.
        sampler: Writer of texts; None where the run file asks for none.
    """

    model: WholeModel
    pairs: PreferenceMeasure | None = None
    sampler: TextSampler | None = None


class FederatedEngine:
    """The loop's engine over sites.

    Args:
        rate: Learning rate of a round, from 0.
        rounds: One line a round: its result, site by site.
        budget: Budget of noisy sums; None where sites bring no noise.
    """

    def __init__(
        self,
        coordinator: RoundCoordinator,
        owned: OwnerModel,
        rate: Callable[[int], float],
        rounds: MetricsFile,
        recorder: RoundRecorder,
        budget: BudgetLedger | None = None,
    ) -> None:
        self._coordinator, self._model, self._rate, self._owned = coordinator, owned.model, rate, owned
        self._rounds, self._recorder, self._budget = rounds, recorder, budget
        self._num_steps = 0

    def train_turn(self, step: int, inputs: StepInputs) -> StepResult:
        """Run one round."""
        del inputs
        excluded = set(self._coordinator.excluded_sites)
        record = self._coordinator.run_round(step + 1, self._rate(step))
        self._num_steps = step + 1
        self._note_round(step, record)
        for site in sorted(self._coordinator.excluded_sites.keys() - excluded):
            self._recorder.observe_event(
                "site_excluded", {"round": step + 1, "site": site, "reason": self._coordinator.excluded_sites[site]}
            )
        return StepResult(
            step=step,
            loss=record.mean_loss,
            num_targets=record.num_targets,
            gradient_norm=record.norm,
            phases=self._coordinator.timer.take_wall(),
            bytes_by_link=record.bytes,
            batch=f"round {record.number}",
            guard=None,
            party_phases={site: {"step": step, "seconds": s} for site, s in record.site_phases().items()},
        )

    def round_weights(self) -> Named:
        """What is trained, as it is now."""
        return self._coordinator.weights

    @property
    def num_steps(self) -> int:
        """Finished rounds."""
        return self._num_steps

    def measure_sets(self, sets: Sequence[Iterable[Batch]]) -> list[Validation]:
        """Measure the owner's held-out rows here, and have each site measure its own."""
        sites = {site: _site_row(scores) for site, scores in self._coordinator.measure_at_sites().items()}
        self._rounds.append_record({"step": max(0, self._num_steps - 1), "measured": self._num_steps, "sites": sites})
        self._model.load_weights(self._coordinator.weights)
        if self._owned.pairs is not None:
            return list(self._owned.pairs([self._model.torch_module], sets))
        return [_make_validation(self._model.measure_batches(batches)) for batches in sets]

    def sample_texts(self) -> tuple[TextSample, ...]:
        """Texts of the model with the agreed weights; none where the run file asks for none."""
        if self._owned.sampler is None:
            return ()
        self._model.load_weights(self._coordinator.weights)
        return tuple(self._owned.sampler.write_samples([self._model.torch_module]))

    def measure_rows(self, rows: Sequence[Batch]) -> list[float]:
        """Sum of nats of each row by the agreed weights, here: no site is asked."""
        self._model.load_weights(self._coordinator.weights)
        return [self._model.measure_batches([row]).loss for row in rows]

    def summary_fields(self) -> dict[str, Any]:
        """Return what summary and report say of sites and sums."""
        return self._coordinator.summary_fields()

    def settle_steps(self) -> None:
        """Nothing of a finished round is under way."""

    def round_shards(self) -> Iterator[Shard]:
        """Weights, frozen factors beside them, and the state of the algorithm."""
        weights = {**self._model.copy_frozen(), **self._coordinator.weights}
        named = {f"{_WEIGHT}{name}": weight for name, weight in weights.items()}
        yield Shard(0, {**named, **self._coordinator.coordinator_state()}, self._num_steps)

    def load_rounds(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.stages_by_tensor()}
        weights = {name.removeprefix(_WEIGHT): weight for name, weight in tensors.items() if name.startswith(_WEIGHT)}
        try:
            self._coordinator.load_state(weights, tensors)
        except KeyError as exc:
            raise CheckpointError(f"{checkpoint.path}: lacks {exc}; it belongs to another kind of run") from exc
        self._num_steps = checkpoint.step

    def _note_round(self, step: int, record: RoundRecord) -> None:
        sites = record.metrics_row()
        row = {
            "step": step,
            "round": record.number,
            "asked": list(record.asked),
            "norm": record.norm,
            **self._spent_epsilon(),
        }
        if record.lost:
            row["lost"] = record.lost
        self._rounds.append_record({**row, "sums": list(record.sums), "sites": sites, "bytes": record.bytes})
        self._recorder.observe_event(
            "round",
            {
                "round": record.number,
                "sites": sorted(record.shares),
                "left_out": dict(sorted(record.left_out.items())),
                "sums": list(record.sums),
            },
        )
        if record.lost:
            self._recorder.observe_event("round_lost", {"round": record.number, "reason": record.lost})
        for site, reason in sorted(record.left_out.items()):
            self._recorder.observe_event("site_left_out", {"round": step + 1, "site": site, "reason": reason})
        losses = {f"sites/{site}/loss": share.loss for site, share in record.shares.items() if share.loss is not None}
        epsilons = {f"sites/{site}/epsilon": epsilon for site, epsilon in self._coordinator.spent.items()}
        figures = {"sites": float(len(record.shares)), "update_norm": record.norm, **losses, **epsilons}
        self._recorder.figures = figures | self._spent_epsilon()

    def _spent_epsilon(self) -> dict[str, float]:
        """Return the spent epsilon; of private rows, the largest of the sites."""
        if self._coordinator.spent:
            return {"epsilon": max(self._coordinator.spent.values())}
        return {} if self._budget is None else {"epsilon": self._budget.epsilon_spent}


class SiteBudgets:
    """The budgets of sites with private rows, as they have told them; each is kept by its site."""

    def __init__(self, coordinator: RoundCoordinator, settings: PrivacyConfig) -> None:
        self._coordinator, self._settings = coordinator, settings

    @property
    def is_spent(self) -> bool:
        """Whether too few sites are left for a round."""
        return self._coordinator.is_spent

    def summary_fields(self) -> dict[str, Any]:
        """Return what summary and report say."""
        sites = dict(sorted(self._coordinator.spent.items()))
        return {
            "example": "one training row of a site",
            "sampling": self._settings.sampling,
            "clip_norm": self._settings.clip_norm,
            "epsilon": self._settings.epsilon,
            "delta": self._settings.delta,
            "epsilon_spent": max(sites.values(), default=0.0),
            "sites": sites,
        }


def _make_validation(scores: SiteScores) -> Validation:
    if scores.classes:
        return Scores.from_counts(scores.loss, scores.classes)
    return perplexity_of(scores.loss, scores.num_targets)


def _site_row(scores: SiteScores) -> dict[str, Any]:
    """The line of one site's own held-out rows."""
    if not scores.num_targets:
        return {"targets": 0}
    value = _make_validation(scores)
    if isinstance(value, Scores):
        return {"targets": scores.num_targets, "loss": value.loss, "accuracy": value.accuracy}
    return {"targets": scores.num_targets, "loss": loss_of(perplexity_of(scores.loss, scores.num_targets))}
