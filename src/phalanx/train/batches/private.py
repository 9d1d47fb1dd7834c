"""The batches of a run with ``[privacy]``: no batch is drawn that was not charged to the budget first."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.data import IGNORE, Batch, BatchLoader, Corpus
from phalanx.data.batch import ignore_repeats
from phalanx.errors import CheckpointError, ConfigError
from phalanx.federated.private_rows import SiteRows, open_site_ledger
from phalanx.federated.site_trainer import SiteData
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import Identity
from phalanx.security.privacy import (
    BudgetLedger,
    CappedPoissonGaussian,
    NoisyRounds,
    PastCharges,
    PoissonGaussian,
    PrivacyConfig,
    check_rate,
    max_mean_rows,
    min_noise_multiplier,
    poisson_sample,
    sampling_key,
)
from phalanx.security.privacy.capped import SPILLED
from phalanx.train.config import DomainRun, FederatedRun, PipelineRun

_AGAINST = {"against": "readers of the weights; owner, workers and auditors know the noise"}
"""Against which readers a bound holds where auditors compute noise again."""


class PoissonLoader:
    """Training batches of which each row is drawn by itself; a batch has another number of rows each time.

    Rows without targets fill a batch up, so that ranks and microbatches have equally many.

    Args:
        batch_size: Rows of a batch in the mean.
        key: Secret; with the number of the charge it decides the rows.
        places: Rows for which a batch has room; drawn ones beyond are left out. None where there is always room.

    Guarantees:
        Each batch is charged before its rows are known, and its number never comes again: the batch of a step that is
        done again after a crash is another one.
    """

    def __init__(
        self,
        corpus: Corpus,
        batch_size: int,
        multiple: int,
        key: bytes,
        ledger: BudgetLedger,
        places: int | None = None,
    ) -> None:
        self._corpus, self._batch_size, self._multiple = corpus, batch_size, multiple
        self._key, self._ledger, self._places = key, ledger, places

    @property
    def corpus_digest(self) -> str:
        """SHA-256 in hex of all that batches are drawn from."""
        return self._corpus.digest

    def next_batch(self) -> Batch:
        """Charge and draw the next batch."""
        number, rows = self._ledger.charge_batch(), self._corpus.num_train_sequences
        drawn = poisson_sample(self._key, number, rows, self._batch_size).tolist()[: self._places]
        missing = -len(drawn) % self._multiple if drawn else self._multiple
        batch = self._corpus.train_batch([*drawn, *[0] * missing])
        labels = batch.labels.clone()
        labels[len(drawn) :] = IGNORE
        return replace(batch, labels=labels, figures=charged_figures(self._ledger))

    def position_state(self) -> dict[str, Any]:
        """How rows are drawn: the ledger decides which come next, and knows the corpus, which no checkpoint tells."""
        return {"sampling": "poisson"}

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Compare a state with this run's."""
        if state.get("sampling") != "poisson":
            raise CheckpointError(
                f"loader state: {dict(state)!s:.200}, expected {self.position_state()}; resume with the [privacy] of "
                "the run that was saved"
            )


class ChargedLoader(BatchLoader):
    """Batches in the loader's public order, each of which is charged as if every row were in it, once."""

    def __init__(self, corpus: Corpus, batch_size: int, seed: int, ledger: BudgetLedger) -> None:
        super().__init__(corpus, batch_size, seed)
        self._ledger = ledger

    def next_batch(self) -> Batch:
        self._ledger.charge_batch()
        return replace(ignore_repeats(super().next_batch()), figures=charged_figures(self._ledger))

    def position_state(self) -> dict[str, Any]:
        # the ledger knows the corpus, by whose digest a reader of the checkpoint could try rows
        return {name: value for name, value in super().position_state().items() if not name.startswith("corpus")}

    def load_position(self, state: Mapping[str, Any]) -> None:
        super().load_position({**super().position_state(), **state})


def charged_figures(ledger: BudgetLedger) -> dict[str, float]:
    """Return the budget's metrics of a step: an upper bound of the spent budget."""
    return {"epsilon": ledger.epsilon_bound}


@dataclass(frozen=True)
class PrivateBatches:
    """The batches of a run with ``[privacy]``, their budget, and the rows of one in the mean."""

    loader: PoissonLoader | ChargedLoader
    ledger: BudgetLedger
    mean_rows: int


def private_batches(
    run: PipelineRun | DomainRun, corpus: object, log: AuditLog, past: PastCharges, secrets: Path
) -> PrivateBatches | None:
    """Return the loader of a run and its budget; None for a run without ``[privacy]``.

    Args:
        past: Charges that the log has from earlier sessions.

    Raises:
        ConfigError: The budget pays for no step, or rows cannot be drawn as it assumes.
        CertificateError: The key of the draw cannot be made, or others may have read it.
    """
    privacy, train = run.privacy, run.train
    if privacy is None:
        return None
    if not isinstance(corpus, Corpus):
        raise ConfigError("[privacy] needs single rows, which this run does not have; remove one")
    if corpus.sample_order(0, train.batch_size).is_mixed:
        raise ConfigError("[privacy] excludes mixtures: every row must have the same chance to be drawn; use one group")
    rows = corpus.num_train_sequences
    mean = _mean_rows(run, privacy, rows) if isinstance(run, PipelineRun) else train.batch_size
    share = check_rate(rows, mean, privacy.delta)
    rate = share if privacy.sampling == "poisson" else 1.0
    terms = _ledger_terms(privacy, rows, corpus.digest)
    if isinstance(run, PipelineRun):
        step, terms = _step_in_stages(run, privacy, rate, rows, past), {**terms, "places": train.batch_size, **_AGAINST}
    else:
        step = PoissonGaussian(_noise_multiplier(privacy, rate, train.steps, past), rate)
    noise = step.noise_multiplier
    # a step that fails draws another batch
    session = train.steps * (1 + train.max_failed_batches) + 1
    ledger = BudgetLedger(log, step, privacy.epsilon, privacy.delta, terms, past, session)
    if not ledger.affordable:
        raise ConfigError(
            f"privacy.epsilon = {privacy.epsilon} does not allow one step with noise_multiplier = {noise:g}; raise one"
        )
    if privacy.sampling == "order":
        return PrivateBatches(ChargedLoader(corpus, train.batch_size, train.seed, ledger), ledger, train.batch_size)
    parts = train.microbatches * run.row_cuts[0]
    places = train.batch_size if isinstance(run, PipelineRun) else None
    return PrivateBatches(PoissonLoader(corpus, mean, parts, sampling_key(secrets), ledger, places), ledger, mean)


def round_budget(run: FederatedRun, sums: NoisyRounds | None, log: AuditLog, past: PastCharges) -> BudgetLedger | None:
    """Return the budget of the noisy sums of federated rounds; None where sites bring no noise."""
    privacy = run.federated.privacy
    if privacy is None or sums is None:
        return None
    terms = {
        "example": "all data of one site",
        "neighbours": "a site's update is zeros",
        "sampling": "none",
        "clip_norm": run.federated.max_norm,
        "sites": len(run.federated.sites),
    }
    # a round that fails may have begun a sum
    session = run.train.steps * (1 + run.train.max_failed_batches) + 1
    ledger = BudgetLedger(log, sums, privacy.epsilon, privacy.delta, terms, past, session)
    if not ledger.affordable:
        raise ConfigError(
            f"federated.privacy.epsilon = {privacy.epsilon} does not allow one sum with noise_multiplier = "
            f"{sums.noise_multiplier:g}; raise one"
        )
    return ledger


def site_rows(run: FederatedRun, data: SiteData, identity: Identity, own: Path) -> SiteRows | None:
    """Return the draws of one site's training rows, and its own budget; None for a run without ``[privacy]``.

    Raises:
        ConfigError: The budget pays for no round, or earlier rounds of this directory were charged for other terms.
    """
    privacy, train = run.privacy, run.train
    if privacy is None:
        return None
    share = check_rate(data.num_sequences, train.batch_size, privacy.delta)
    rate = share if privacy.sampling == "poisson" else 1.0
    log, past = open_site_ledger(own / "privacy", identity)
    steps = train.steps * run.federated.local_steps
    step = PoissonGaussian(_noise_multiplier(privacy, rate, steps, past), rate)
    terms = _ledger_terms(privacy, data.num_sequences, data.digest)
    # a round that is done again by a process that has begun anew draws other rows
    session = steps * (1 + train.max_failed_batches) + run.federated.local_steps
    ledger = BudgetLedger(log, step, privacy.epsilon, privacy.delta, terms, past, session)
    if ledger.affordable < run.federated.local_steps:
        raise ConfigError(
            f"privacy.epsilon = {privacy.epsilon} does not allow federated.local_steps = "
            f"{run.federated.local_steps} steps with noise_multiplier = {step.noise_multiplier:g}; raise one, or "
            "lower local_steps"
        )
    return SiteRows(data, privacy, ledger, sampling_key(own / "secrets"))


def _mean_rows(run: PipelineRun, wanted: PrivacyConfig, rows: int) -> int:
    """Return how many rows a step of a pipeline draws in the mean."""
    places, steps = run.train.batch_size, run.train.steps
    if wanted.sampling == "order":
        return places
    max_rows = max_mean_rows(rows, places, steps, wanted.epsilon, wanted.delta)
    mean = wanted.mean_rows or max_rows
    if not 0 < mean <= max_rows:
        raise ConfigError(
            f"privacy.mean_rows = {wanted.mean_rows or 1}: in {steps} steps with room for train.batch_size = "
            f"{places} rows each, samples exceed that room too often for privacy.delta = {wanted.delta}; at most "
            f"{max_rows} are drawn in the mean here, so lower it, or raise train.batch_size and train.microbatches"
        )
    return mean


def _step_in_stages(
    run: PipelineRun, wanted: PrivacyConfig, rate: float, rows: int, past: PastCharges
) -> PoissonGaussian | CappedPoissonGaussian:
    """Return the mechanism of a step of a pipeline, which has room for `train.batch_size` rows."""
    if wanted.sampling == "order":
        return PoissonGaussian(_noise_multiplier(wanted, rate, run.train.steps, past), rate)
    inner = wanted.model_copy(update={"delta": (1 - SPILLED) * wanted.delta})
    return CappedPoissonGaussian(
        _noise_multiplier(inner, rate, run.train.steps, past), rate, rows, run.train.batch_size
    )


def _noise_multiplier(wanted: PrivacyConfig, rate: float, steps: int, past: PastCharges) -> float:
    noise = wanted.noise_multiplier
    if past.terms is not None and noise is None:
        # a longer run goes on with the noise that it had, until the budget is spent
        noise = float(past.terms["noise_multiplier"])
    return noise or min_noise_multiplier(wanted.epsilon, wanted.delta, rate, steps)


def _ledger_terms(wanted: PrivacyConfig, rows: int, corpus: str) -> dict[str, Any]:
    return {
        "example": "one training row",
        "neighbours": "a row is removed",
        "sampling": wanted.sampling,
        "clip_norm": wanted.clip_norm,
        "rows": rows,
        "corpus": corpus,
    }
