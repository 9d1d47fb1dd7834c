"""The owner of federated rounds: asks sites, lets updates in, and moves the model by what they come to."""

import hashlib
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from phalanx.aggregators import aggregate
from phalanx.errors import AggregationError, ConfigError, FailedRoundError, UpdateRefusedError
from phalanx.federated.admission import PROVEN, DueUpdates, UpdateAdmission
from phalanx.federated.algorithms import ALGORITHMS, CONTROL, Named, staleness_weight
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import SentOrder
from phalanx.federated.enclave.aggregator import AggregatorPort
from phalanx.federated.enclave.sums import EnclaveSumMaker
from phalanx.federated.local import SiteScores
from phalanx.federated.reputation import SiteRecords, distances_to
from phalanx.federated.rounds.fleet import Fleet, SiteAnswer
from phalanx.federated.rounds.journal import HeldUpdate, LostRounds, RoundJournal, RoundRecord, SiteShare
from phalanx.federated.rounds.kept_sums import KeptSumMaker
from phalanx.federated.rounds.summing import SumMaker
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.vectors import flatten, mean_of_products, norm_of, num_values, shapes_of, unflatten
from phalanx.security.crypto import Identity, digest_hex
from phalanx.security.privacy import BudgetLedger
from phalanx.telemetry import PhaseTimer

BUDGET_SPENT = "the privacy budget of its own rows is spent"
"""Why a site is asked no more that has said so."""


class RoundCoordinator:
    """The rounds of one run.

    Args:
        terms: Of the run.
        summed_by: The owner, which signs the terms of masked sums; or the aggregator in an enclave.
        fleet: The sites.
        journal: What is admitted is noted there before it counts.
        weights: What is trained, as it is at first.
        budget: Charged for the sums of a round before they are asked for, where sites bring noise.

    Attributes:
        weights: As they are now.
        timer: Where the time of rounds goes.
        spent: Epsilon of the private rows of each site, the most that it has said, in whatever session; empty where
            rows are not private.

    Guarantees:
        The model moves once a round, by updates of that round's weights (with "fedbuff" of weights that are not too
        old), each site counting once, or not at all. A round that fails changes nothing, and may be asked for again:
        sites answer with what they have trained. Where a sum of it was released, sites give none of other sites: if
        the same ones give none either, the round is lost, its record says so, and the next one begins. No word of a
        site, and nothing that another site sends, has a site shut out but what it has signed itself.
    """

    def __init__(
        self,
        terms: RunTerms,
        summed_by: Identity | AggregatorPort,
        fleet: Fleet,
        journal: RoundJournal,
        weights: Named,
        budget: BudgetLedger | None = None,
    ) -> None:
        self.weights, self.timer = weights, PhaseTimer()
        self._terms, self._fleet, self._journal = terms, fleet, journal
        self._config, self._budget = terms.config, budget
        if (budget is None) is not (terms.config.privacy is None):
            raise ConfigError("federated.privacy: sums with noise have a budget that they are charged to, others none")
        self._shapes = shapes_of(weights)
        self._server = ALGORITHMS[self._config.algorithm.kind].server(self._config.algorithm, num_values(self._shapes))
        has_controls = self._config.algorithm.kind == "scaffold"
        self._controls: Named = {name: torch.zeros_like(one) for name, one in weights.items() if has_controls}
        self._admission = UpdateAdmission(terms.roster)
        self._records = SiteRecords()
        self._lost = LostRounds()
        self.spent: dict[str, float] = {}
        self._counted: dict[str, int] = {}
        self._models: dict[int, str] = {}
        self._asked_in: dict[str, int] = {}
        self._recalled: dict[str, tuple[bytes, bytes]] = {}
        self._held: tuple[int, dict[str, HeldUpdate]] = (0, {})
        self._sums = _sums_of(terms, summed_by, fleet, journal, num_values(self._shapes))

    @property
    def excluded(self) -> dict[str, str]:
        """Sites that are asked no more, with reasons."""
        return self._admission.excluded

    def told(self) -> dict[str, Any]:
        """Return what a person must know of sites and of what the owner saw of them."""
        config = self._config
        sees = f"sums of updates ({config.sums}), and no single one" if config.secure else "each site's update"
        if config.sums == "enclave" and config.secure:
            sees = "one update a round, which an aggregator in an enclave makes of the sites' own"
        return {
            "sites": list(config.sites),
            "asked": config.num_asked,
            "algorithm": config.algorithm.kind,
            "aggregator": config.aggregator,
            "owner_sees": sees,
            "excluded": dict(sorted(self.excluded.items())),
        }

    @property
    def is_spent(self) -> bool:
        """Whether too few sites are left for a round because others have spent their own budgets."""
        left = len(self._config.sites) - len(self.excluded)
        return left < self._least and BUDGET_SPENT in self.excluded.values()

    @property
    def _least(self) -> int:
        """Updates that a round needs."""
        algorithm = self._config.algorithm
        enough = algorithm.buffer if algorithm.kind == "fedbuff" else self._config.min_cohort
        return min(self._config.min_cohort, enough)

    def recall(self, finished: int) -> None:
        """Go on after so many finished rounds, with what the journal has of the round after them."""
        found = self._journal.recall(finished)
        self._admission.recall(found.headers)
        self._counted, self._models, self._recalled = found.counted, found.models, found.open
        self.spent = found.spent
        for site in found.refused:
            self._records.note_refusal(site)
        for site, reason in found.excluded.items():
            self._admission.exclude(site, reason)

    def state(self) -> Named:
        """Everything beside the weights that later rounds depend on."""
        return {f"server/{name}": one for name, one in self._server.state().items()} | {
            CONTROL + name: one for name, one in self._controls.items()
        }

    def load_state(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Go on where a state was taken."""
        self.weights = {name: weights[name].clone() for name in self._shapes}
        self._server.load_state(
            {name.removeprefix("server/"): one for name, one in state.items() if name.startswith("server/")}
        )
        self._controls = {name: state[CONTROL + name].clone() for name in self._controls}

    def round(self, number: int, rate: float) -> RoundRecord:
        """Run one round to its end.

        Args:
            number: From 1.
            rate: Learning rate of the sites.

        Raises:
            FailedRoundError: Too few updates came, or no sum; nothing changed.
            PrivacyBudgetError: The budget does not pay for another sum.
        """
        payload = self._payload()
        model = digest_hex(payload)
        held = self._open(number, model)
        record = RoundRecord(number, tuple(sorted({*held, *self._cohort(number, len(held))})))
        out, back = self._fleet.bytes_out.copy(), self._fleet.bytes_in.copy()
        with self.timer.phase("train"):
            self._train(record, held, (payload, model, rate))
        update = self._aggregate(record, held, model)
        if update is not None:
            with self.timer.phase("update"):
                self._apply(record, update)
        counted = {site: held[site].round if site in held else number for site in record.shares}
        self._journal.closed(number, counted)
        self._counted |= counted
        for site in sorted(site for site, share in record.shares.items() if share.rounds_left == 0):
            self._exclude(site, BUDGET_SPENT)
        self._held = (0, {})
        for site in sorted({*self._fleet.bytes_out, *self._fleet.bytes_in}):
            record.bytes[f"owner>{site}"] = self._fleet.bytes_out[site] - out[site]
            record.bytes[f"{site}>owner"] = self._fleet.bytes_in[site] - back[site]
        return record

    def measure(self) -> dict[str, SiteScores]:
        """Have the sites that are there measure the weights as they are on their own held-out rows.

        None does where sites bring noise: their scores would tell of their rows without any.
        """
        if self._budget is not None:
            return {}
        payload = self._payload()
        # what is held out costs no budget, so a site that trains no more still measures
        sites = self._fleet.idle() - {site for site, why in self.excluded.items() if why != BUDGET_SPENT}
        found: dict[str, SiteScores] = {}
        with self.timer.phase("measure"):
            self._fleet.ask(
                {site: lambda ticket: SentOrder(m.MeasureOrder(ticket=ticket), payload) for site in sorted(sites)},
                m.MeasuredReply,
            )
            for answer in self._fleet.answers(self._config.deadline_s, sites):
                if isinstance(answer.reply, m.MeasuredReply):
                    reply = answer.reply
                    found[answer.site] = SiteScores(reply.loss, reply.num_targets, reply.classes)
            self._fleet.give_up(sites)
        return found

    def _payload(self) -> bytes:
        return save({**self.weights, **{CONTROL + name: one for name, one in self._controls.items()}})

    def _open(self, number: int, model: str) -> dict[str, HeldUpdate]:
        """Note that a round begins; return what has been let into this very one already, in whatever session."""
        recalled, self._recalled = self._recalled, {}
        if self._models.get(number) != model:
            self._models[number] = model
            self._journal.opened(number, model)
            self._held = (number, {})
            return self._held[1]
        if self._held[0] != number:
            self._held = (number, {})
        held = self._held[1]
        for site, (header, values) in recalled.items():
            try:
                found = self._admission.admit(site, header, values, self._due(number))
            except UpdateRefusedError:
                # of a site that was shut out after it was let in
                continue
            # what a site had said beside its update is not kept
            share = SiteShare(0.0, 0, found.samples, found.norm, 1.0, 0.0)
            held[site] = HeldUpdate(number, header, flatten(found.tensors), share)
        return held

    def _cohort(self, number: int, num_held: int) -> tuple[str, ...]:
        """Draw the sites of a round among those that can be asked."""
        there = self._fleet.idle() - self.excluded.keys() - self._held[1].keys()
        drawn = random.Random(hashlib.sha256(f"cohort {self._terms.seed} {number}".encode()).digest())  # noqa: S311
        order = sorted(self._config.sites, key=lambda site: drawn.random())
        return tuple([site for site in order if site in there][: self._config.num_asked - num_held])

    def _train(self, record: RoundRecord, held: dict[str, HeldUpdate], sent: tuple[bytes, str, float]) -> None:
        """Have the sites train, and hold what they send; of sums, that they have trained."""
        payload, model, rate = sent
        asked = [site for site in record.asked if site not in held]

        def order(site: str, ticket: int) -> SentOrder:
            told = m.TrainOrder(
                ticket=ticket, round=record.number, model=model, rate=rate, counted=self._counted.get(site, 0)
            )
            return SentOrder(told, payload)

        self._fleet.ask({site: partial(order, site) for site in asked}, m.TrainedReply)
        self._asked_in |= dict.fromkeys(asked, record.number)
        record.shares |= {site: one.share for site, one in held.items()}
        algorithm = self._config.algorithm
        enough = algorithm.buffer if algorithm.kind == "fedbuff" else len(self._config.sites)
        if len(record.shares) < enough:
            for answer in self._fleet.answers(self._config.deadline_s):
                self._take(answer, record, held)
                if len(record.shares) >= enough:
                    break
        if algorithm.kind != "fedbuff":
            record.left_out |= dict.fromkeys(self._fleet.waited_for(), "late")
            self._fleet.give_up(self._fleet.waited_for())
        if len(record.shares) < self._least:
            # what was let in is kept, and counts when the round is asked for again
            said = ", ".join(f"{site} ({why})" for site, why in sorted(record.left_out.items())) or "none was there"
            raise FailedRoundError(
                f"round {record.number}: {len(record.shares)} updates, federated.min_cohort = "
                f"{self._config.min_cohort}; missing: {said}"
            )

    def _is_as_agreed(self, reply: m.TrainedReply) -> bool:
        """Whether a site tells of loss and budget what the run file has it tell, and no more spent than it may."""
        rows = self._terms.rows
        if (reply.loss is None) is not (self._budget is not None or rows is not None):
            return False
        if rows is None or reply.epsilon is None:
            return rows is None and reply.epsilon is None
        return reply.epsilon <= rows.epsilon

    def _take(self, answer: SiteAnswer, record: RoundRecord, held: dict[str, HeldUpdate]) -> None:
        reply = answer.reply
        if not isinstance(reply, m.TrainedReply):
            record.left_out[answer.site] = answer.fault
            if answer.fault == "budget_spent" and self._terms.rows is not None:
                self._exclude(answer.site, BUDGET_SPENT)
            return
        if not self._is_as_agreed(reply):
            record.left_out[answer.site] = "malformed"
            return
        share = SiteShare(reply.loss, reply.num_targets, reply.samples, None, reply.scaled, reply.train_s)
        share.epsilon, share.rounds_left = reply.epsilon, reply.rounds_left
        if reply.epsilon is not None and reply.epsilon > self.spent.get(answer.site, -1.0):
            self._journal.spent(answer.site, reply.epsilon)
            self.spent[answer.site] = reply.epsilon
        if self._config.secure:
            record.shares[answer.site] = share
            return
        trained_in = self._asked_in.get(answer.site, record.number)
        share.behind = record.number - trained_in
        if share.behind > self._most_behind:
            record.left_out[answer.site] = "stale"
            return
        header, values = reply.header.encode("utf-8"), bytes(answer.payload)
        try:
            found = self._admission.admit(answer.site, header, values, self._due(trained_in))
        except UpdateRefusedError as exc:
            record.left_out[answer.site] = exc.reason
            if exc.reason in PROVEN:
                self._journal.refused(record.number, answer.site, exc.reason, header)
                if self._records.note_refusal(answer.site):
                    self._exclude(answer.site, f"refused again: {exc.reason}")
            return
        share.norm, share.samples = found.norm, found.samples
        self._journal.admitted(record.number, answer.site, header, values)
        held[answer.site] = HeldUpdate(trained_in, header, flatten(found.tensors), share)
        record.shares[answer.site] = share

    @property
    def _most_behind(self) -> int:
        algorithm = self._config.algorithm
        return algorithm.most_stale if algorithm.kind == "fedbuff" else 0

    def _due(self, number: int) -> DueUpdates:
        shapes = dict(self._shapes) | {CONTROL + name: self._shapes[name] for name in self._controls}
        config = self._config
        most = config.most_samples if config.weights == "samples" else 1
        return DueUpdates(
            self._terms.digest, number, self._models[number], shapes, torch.float32, config.max_norm, most
        )

    def _aggregate(self, record: RoundRecord, held: Mapping[str, HeldUpdate], model: str) -> Tensor | None:
        """Return one update of those that are held, or of the secure sums; None where the round is lost."""
        earlier = self._journal.released(record.number, model)
        try:
            if self._config.secure:
                if self._budget is not None:
                    record.charge = self._budget.charge()
                with self.timer.phase("sum"):
                    update = self._sums.update(record, model, self._exclude)
            else:
                with self.timer.phase("aggregate"):
                    update = self._update_of(record, held)
        except (AggregationError, ConfigError) as exc:
            # too few sites are left for a sum, or for a rule that stands those that may lie
            members = {site for one in self._journal.released(record.number, model) for site in one.members}
            # beside noise each sum is paid for, and another one may be of other sites
            is_bound = self._budget is None and (earlier or members & self.excluded.keys())
            if not is_bound:
                raise FailedRoundError(f"round {record.number}: {exc}") from exc
            self._lost.note(record, members, str(exc))
            return None
        self._lost.in_a_row = 0
        return update

    def _update_of(self, record: RoundRecord, held: Mapping[str, HeldUpdate]) -> Tensor:
        config, sites = self._config, sorted(held)
        vectors = torch.stack([held[site].vector for site in sites])
        if config.aggregator != "mean":
            update = aggregate(vectors, config.aggregator, config.byzantine, config.before)
            self._records.note_distances(distances_to(update, dict(zip(sites, vectors, strict=True))))
            for site in sites:
                record.shares[site].far_rounds = self._records.far_rounds[site]
            return update
        samples = torch.tensor([float(held[site].share.samples) for site in sites])
        if config.exchange == "product":
            named = [unflatten(vector, self._shapes) for vector in vectors]
            return flatten(mean_of_products(self.weights, named, samples.tolist()))
        stale = torch.tensor([staleness_weight(held[site].share.behind) for site in sites])
        return (samples / samples.sum() * stale) @ vectors

    def _exclude(self, site: str, reason: str) -> None:
        self._admission.exclude(site, reason)
        self._journal.excluded(site, reason)

    def _apply(self, record: RoundRecord, update: Tensor) -> None:
        """Move weights, and the controls beside them."""
        if self._controls:
            both = unflatten(update, {**self._shapes, **{CONTROL + name: one for name, one in self._shapes.items()}})
            for name, one in self._controls.items():
                one.add_(both[CONTROL + name], alpha=len(record.shares) / len(self._config.sites))
            update = flatten({name: both[name] for name in self._shapes})
        moved = self._server.step(update)
        if not torch.isfinite(moved).all():
            raise FailedRoundError(f"round {record.number}: its step is not finite; lower federated.algorithm.rate")
        named = unflatten(moved, self._shapes)
        record.norm = norm_of(named)
        self.weights = {name: one + named[name] for name, one in self.weights.items()}


def _sums_of(
    terms: RunTerms, summed_by: Identity | AggregatorPort, fleet: Fleet, journal: RoundJournal, length: int
) -> SumMaker | KeptSumMaker | EnclaveSumMaker:
    if terms.config.sums == "homomorphic":
        return KeptSumMaker(terms, fleet, journal, length)
    if not isinstance(summed_by, Identity):
        return EnclaveSumMaker(terms, fleet, journal, summed_by)
    if terms.config.sums == "enclave":
        raise ConfigError('federated.sums = "enclave": no aggregator was started')
    return SumMaker(terms, summed_by, fleet, journal, length)
