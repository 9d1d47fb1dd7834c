"""The owner of federated rounds: sends orders to sites, admits updates, and moves the model by their aggregate."""

import hashlib
import random
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from phalanx.aggregators import aggregate_updates, check_rule
from phalanx.errors import AggregationError, ConfigError, FailedRoundError, UpdateRefusedError
from phalanx.federated.admission import PROVEN, DueUpdates, UpdateAdmission
from phalanx.federated.algorithms import ALGORITHMS, CONTROL, Named, staleness_weight
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import SentOrder
from phalanx.federated.enclave.aggregator import AggregatorPort
from phalanx.federated.enclave.sums import EnclaveSumMaker
from phalanx.federated.local import SiteScores
from phalanx.federated.rounds.fleet import Fleet, SiteAnswer
from phalanx.federated.rounds.journal import HeldUpdate, LostRounds, RoundJournal, RoundRecord, SiteShare
from phalanx.federated.rounds.kept_sums import KeeperSumMaker
from phalanx.federated.rounds.summing import SumMaker
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.vectors import (
    flatten_tensors,
    mean_of_products,
    norm_of,
    num_values,
    seed_of,
    shapes_of,
    unflatten_vector,
)
from phalanx.security.crypto import Identity, digest_hex
from phalanx.security.privacy import BudgetLedger
from phalanx.telemetry import PhaseTimer

MAX_REFUSALS = 2
"""Refused updates that show a lie of their site, after which it is shut out."""
FAR = 2.0
"""An update is far when its distance to the result is so many times the median distance."""


class SiteRecords:
    """Refused signed updates of each site, and the rounds in which its update was far.

    Only signed statements shut a site out. Distances never do: data of sites differ, so a far site may be an honest
    one, and a liar could choose which honest site looks far. A robust rule withstands liars in each round without a
    verdict.

    Attributes:
        far_rounds: Rounds in a row in which a site's update was far, for people to look at.
    """

    def __init__(self) -> None:
        self._refusals: Counter[str] = Counter()
        self.far_rounds: Counter[str] = Counter()

    def note_distances(self, distances: Mapping[str, float]) -> None:
        """Take the distances of a round's updates to its result, of `distances_to`."""
        median = float(torch.tensor(sorted(distances.values())).median()) if distances else 0.0
        for site, distance in distances.items():
            self.far_rounds[site] = self.far_rounds[site] + 1 if distance > FAR * median else 0

    def note_refusal(self, site: str) -> bool:
        """Take a refusal that shows a lie of the site; tell whether the site is to be shut out."""
        self._refusals[site] += 1
        return self._refusals[site] == MAX_REFUSALS


def distances_to(result: Tensor, updates: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Euclidean distance of each site's update to the result."""
    return {site: float(torch.linalg.vector_norm(update - result)) for site, update in updates.items()}


BUDGET_SPENT = "the privacy budget of its own rows is spent"
"""Why a site is asked no more that has said so."""


class RoundCoordinator:
    """The rounds of one run.

    Args:
        summed_by: The owner, which signs the terms of masked sums; or the aggregator in an enclave.
        journal: Journal that an admitted update enters before it counts.
        budget: Charged for the sums of a round before they are asked for, where sites bring noise.

    Attributes:
        spent: Epsilon of the private rows of each site, the most that it has said, in whatever session; empty where
            rows are not private.

    Guarantees:
        The model moves once a round, by updates of that round's weights (with "fedbuff" of weights that are not too
        old), each site counting once, or not at all. A round that fails changes nothing, and may be asked for again:
        sites answer with their trained update. Where a sum of it was released, sites release none of other sites: if
        the same ones release none either, the round is lost, its record says so, and the next one begins. Only a site's
        own signed statement has it shut out, never its claims and never another site's messages.
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
            raise ConfigError("federated.privacy: sums with noise need a budget, sums without noise must have none")
        # before any site has trained
        num_updates = self._config.num_asked // (self._config.bucket or 1)
        check_rule(num_updates, self._config.aggregator, self._config.byzantine, self._config.before)
        self._shapes = shapes_of(weights)
        self._server = ALGORITHMS[self._config.algorithm.kind].server(self._config.algorithm, num_values(self._shapes))
        has_controls = self._config.algorithm.kind == "scaffold"
        self._controls: Named = {name: torch.zeros_like(weight) for name, weight in weights.items() if has_controls}
        self._admission = UpdateAdmission(terms.roster)
        self._records = SiteRecords()
        self._lost = LostRounds()
        self.spent: dict[str, float] = {}
        self._counted: dict[str, int] = {}
        self._models: dict[int, str] = {}
        self._asked_in: dict[str, int] = {}
        self._recalled: dict[str, tuple[bytes, bytes]] = {}
        self._held: tuple[int, dict[str, HeldUpdate]] = (0, {})
        self._sums = _make_sum_maker(terms, summed_by, fleet, journal, num_values(self._shapes))

    @property
    def excluded_sites(self) -> dict[str, str]:
        """Sites that are asked no more, with reasons."""
        return self._admission.excluded_sites

    def summary_fields(self) -> dict[str, Any]:
        """Return the fields of the summary about sites and the owner's findings about them."""
        config = self._config
        sees = f"sums of updates ({config.sums}), and no single one" if config.secure else "each site's update"
        if config.sums == "enclave" and config.secure:
            sees = "one update a round, which an aggregator in an enclave computes"
        return {
            "sites": list(config.sites),
            "asked": config.num_asked,
            "algorithm": config.algorithm.kind,
            "aggregator": config.aggregator,
            "owner_sees": sees,
            "excluded": dict(sorted(self.excluded_sites.items())),
        }

    @property
    def is_spent(self) -> bool:
        """Whether too few sites are left for a round because others have spent their own budgets."""
        remaining = len(self._config.sites) - len(self.excluded_sites)
        return remaining < self._min_updates and BUDGET_SPENT in self.excluded_sites.values()

    @property
    def _min_updates(self) -> int:
        """Updates that a round needs."""
        algorithm = self._config.algorithm
        enough = algorithm.buffer if algorithm.kind == "fedbuff" else self._config.min_cohort
        return min(self._config.min_cohort, enough)

    def resume_rounds(self, finished: int) -> None:
        """Go on after so many finished rounds, with the journal's entries for the round after them."""
        recalled = self._journal.recall_rounds(finished)
        self._admission.recall_updates(recalled.headers)
        self._counted, self._models, self._recalled = recalled.counted, recalled.models, recalled.open
        self.spent = recalled.spent
        for site in recalled.refused:
            self._records.note_refusal(site)
        for site, reason in recalled.excluded.items():
            self._admission.exclude_site(site, reason)

    def coordinator_state(self) -> Named:
        """Everything beside the weights that later rounds depend on."""
        return {f"server/{name}": tensor for name, tensor in self._server.server_state().items()} | {
            CONTROL + name: tensor for name, tensor in self._controls.items()
        }

    def load_state(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Go on where a state was taken."""
        self.weights = {name: weights[name].clone() for name in self._shapes}
        self._server.load_state(
            {name.removeprefix("server/"): tensor for name, tensor in state.items() if name.startswith("server/")}
        )
        self._controls = {name: state[CONTROL + name].clone() for name in self._controls}

    def run_round(self, number: int, rate: float) -> RoundRecord:
        """Run one round to its end.

        Raises:
            FailedRoundError: Too few updates came, or no sum; nothing changed.
        """
        payload = self._weights_payload()
        model = digest_hex(payload)
        updates = self._open_round(number, model)
        record = RoundRecord(number, tuple(sorted({*updates, *self._draw_cohort(number, len(updates))})))
        out, back = self._fleet.bytes_out.copy(), self._fleet.bytes_in.copy()
        with self.timer.time_phase("train"):
            self._train_sites(record, updates, (payload, model, rate))
        update = self._aggregate_updates(record, updates, model)
        if update is not None:
            with self.timer.time_phase("update"):
                self._apply_update(record, update)
        counted = {site: updates[site].round if site in updates else number for site in record.shares}
        self._journal.note_closed(number, counted)
        self._counted |= counted
        for site in sorted(site for site, share in record.shares.items() if share.rounds_left == 0):
            self._exclude_site(site, BUDGET_SPENT)
        self._held = (0, {})
        for site in sorted({*self._fleet.bytes_out, *self._fleet.bytes_in}):
            record.bytes[f"owner>{site}"] = self._fleet.bytes_out[site] - out[site]
            record.bytes[f"{site}>owner"] = self._fleet.bytes_in[site] - back[site]
        return record

    def measure_at_sites(self) -> dict[str, SiteScores]:
        """Have the sites that are there measure the weights as they are on their own held-out rows.

        None does where sites bring noise: their scores would tell of their rows without any.
        """
        if self._budget is not None:
            return {}
        payload = self._weights_payload()
        # what is held out costs no budget, so a site that trains no more still measures
        sites = self._fleet.idle_sites() - {site for site, why in self.excluded_sites.items() if why != BUDGET_SPENT}
        scores: dict[str, SiteScores] = {}
        with self.timer.time_phase("measure"):
            self._fleet.ask_sites(
                {site: lambda ticket: SentOrder(m.MeasureOrder(ticket=ticket), payload) for site in sorted(sites)},
                m.MeasuredReply,
            )
            for answer in self._fleet.yield_answers(self._config.deadline_s, sites):
                if isinstance(answer.reply, m.MeasuredReply):
                    reply = answer.reply
                    scores[answer.site] = SiteScores(reply.loss, reply.num_targets, reply.classes)
            self._fleet.give_up(sites)
        return scores

    def _weights_payload(self) -> bytes:
        return save({**self.weights, **{CONTROL + name: tensor for name, tensor in self._controls.items()}})

    def _open_round(self, number: int, model: str) -> dict[str, HeldUpdate]:
        """Note that a round begins; return the updates that earlier sessions admitted to this very round."""
        recalled, self._recalled = self._recalled, {}
        if self._models.get(number) != model:
            self._models[number] = model
            self._journal.note_opened(number, model)
            self._held = (number, {})
            return self._held[1]
        if self._held[0] != number:
            self._held = (number, {})
        updates = self._held[1]
        for site, (header, values) in recalled.items():
            try:
                trained_in = self._admission.read_round(header)
                admitted = self._admission.admit_update(site, header, values, self._due_updates(trained_in))
            except UpdateRefusedError:
                # of a site that was shut out after it was let in
                continue
            # what a site had said beside its update is not kept
            share = SiteShare(0.0, 0, admitted.samples, admitted.norm, 1.0, 0.0, behind=number - trained_in)
            updates[site] = HeldUpdate(trained_in, header, flatten_tensors(admitted.tensors), share)
        return updates

    def _draw_cohort(self, number: int, num_held: int) -> tuple[str, ...]:
        """Draw the sites of a round among the reachable ones."""
        present = self._fleet.idle_sites() - self.excluded_sites.keys() - self._held[1].keys()
        drawn = random.Random(hashlib.sha256(f"cohort {self._terms.seed} {number}".encode()).digest())  # noqa: S311
        order = sorted(self._config.sites, key=lambda site: drawn.random())
        return tuple([site for site in order if site in present][: self._config.num_asked - num_held])

    def _train_sites(self, record: RoundRecord, held: dict[str, HeldUpdate], sent: tuple[bytes, str, float]) -> None:
        """Have the sites train, and hold their updates; with sums, note that they have trained."""
        payload, model, rate = sent
        asked = [site for site in record.asked if site not in held]

        def order(site: str, ticket: int) -> SentOrder:
            order = m.TrainOrder(
                ticket=ticket, round=record.number, model=model, rate=rate, counted=self._counted.get(site, 0)
            )
            return SentOrder(order, payload)

        self._fleet.ask_sites({site: partial(order, site) for site in asked}, m.TrainedReply)
        self._asked_in |= dict.fromkeys(asked, record.number)
        record.shares |= {site: update.share for site, update in held.items()}
        algorithm = self._config.algorithm
        enough = algorithm.buffer if algorithm.kind == "fedbuff" else len(self._config.sites)
        if len(record.shares) < enough:
            for answer in self._fleet.yield_answers(self._config.deadline_s):
                self._take_answer(answer, record, held)
                if len(record.shares) >= enough:
                    break
        if algorithm.kind != "fedbuff":
            record.left_out |= dict.fromkeys(self._fleet.waited_for(), "late")
            self._fleet.give_up(self._fleet.waited_for())
        if len(record.shares) < self._min_updates:
            # what was let in is kept, and counts when the round is asked for again
            reasons = ", ".join(f"{site} ({why})" for site, why in sorted(record.left_out.items())) or "no update"
            raise FailedRoundError(
                f"round {record.number}: {len(record.shares)} updates, federated.min_cohort = "
                f"{self._config.min_cohort}; missing: {reasons}"
            )

    def _follows_terms(self, reply: m.TrainedReply) -> bool:
        """Tell whether a reply reports loss and budget as the run file demands, and no more spent than allowed."""
        rows = self._terms.rows
        if (reply.loss is None) is not (self._budget is not None or rows is not None):
            return False
        if rows is None or reply.epsilon is None:
            return rows is None and reply.epsilon is None
        return reply.epsilon <= rows.epsilon

    def _take_answer(self, answer: SiteAnswer, record: RoundRecord, held: dict[str, HeldUpdate]) -> None:
        reply = answer.reply
        record.answer_s[answer.site] = answer.seconds
        if not isinstance(reply, m.TrainedReply):
            record.left_out[answer.site] = answer.fault
            if answer.fault == "budget_spent" and self._terms.rows is not None:
                self._exclude_site(answer.site, BUDGET_SPENT)
            return
        if not self._follows_terms(reply):
            record.left_out[answer.site] = "malformed"
            return
        share = SiteShare(reply.loss, reply.num_targets, reply.samples, None, reply.scaled, reply.train_s)
        share.epsilon, share.rounds_left = reply.epsilon, reply.rounds_left
        if reply.epsilon is not None and reply.epsilon > self.spent.get(answer.site, -1.0):
            self._journal.note_spent(answer.site, reply.epsilon)
            self.spent[answer.site] = reply.epsilon
        if self._config.secure:
            record.shares[answer.site] = share
            return
        trained_in = self._asked_in.get(answer.site, record.number)
        share.behind = record.number - trained_in
        if share.behind > self._max_behind:
            record.left_out[answer.site] = "stale"
            return
        header, values = reply.header.encode("utf-8"), bytes(answer.payload)
        try:
            admitted = self._admission.admit_update(answer.site, header, values, self._due_updates(trained_in))
        except UpdateRefusedError as exc:
            record.left_out[answer.site] = exc.reason
            if exc.reason in PROVEN:
                self._journal.note_refused(record.number, answer.site, exc.reason, header)
                if self._records.note_refusal(answer.site):
                    self._exclude_site(answer.site, f"refused again: {exc.reason}")
            return
        share.norm, share.samples = admitted.norm, admitted.samples
        self._journal.note_admitted(record.number, answer.site, header, values)
        held[answer.site] = HeldUpdate(trained_in, header, flatten_tensors(admitted.tensors), share)
        record.shares[answer.site] = share

    @property
    def _max_behind(self) -> int:
        algorithm = self._config.algorithm
        return algorithm.max_stale if algorithm.kind == "fedbuff" else 0

    def _due_updates(self, number: int) -> DueUpdates:
        shapes = dict(self._shapes) | {CONTROL + name: self._shapes[name] for name in self._controls}
        config = self._config
        max_samples = config.max_samples if config.weights == "samples" else 1
        return DueUpdates(
            self._terms.digest, number, self._models[number], shapes, torch.float32, config.max_norm, max_samples
        )

    def _aggregate_updates(self, record: RoundRecord, held: Mapping[str, HeldUpdate], model: str) -> Tensor | None:
        """Return one update from the held ones, or from the secure sums; None where the round is lost."""
        earlier = self._journal.released_sums(record.number, model)
        try:
            if self._config.secure:
                if self._budget is not None:
                    record.charge = self._budget.charge_batch()
                with self.timer.time_phase("sum"):
                    update = self._sums.make_update(record, model, self._exclude_site)
            else:
                with self.timer.time_phase("aggregate"):
                    update = self._update_of(record, held, model)
        except (AggregationError, ConfigError) as exc:
            # too few sites are left for a sum, or for a rule that stands those that may lie
            members = {
                site for released in self._journal.released_sums(record.number, model) for site in released.members
            }
            # beside noise each sum is paid for, and another one may be of other sites
            is_bound = self._budget is None and (earlier or members & self.excluded_sites.keys())
            if not is_bound:
                raise FailedRoundError(f"round {record.number}: {exc}") from exc
            self._lost.note_lost_round(record, members, str(exc))
            return None
        self._lost.in_a_row = 0
        return update

    def _update_of(self, record: RoundRecord, held: Mapping[str, HeldUpdate], model: str) -> Tensor:
        config, sites = self._config, sorted(held)
        vectors = torch.stack([held[site].vector for site in sites])
        if config.aggregator != "mean":
            update = aggregate_updates(vectors, config.aggregator, config.byzantine, config.before, seed_of(model))
            self._records.note_distances(distances_to(update, dict(zip(sites, vectors, strict=True))))
            for site in sites:
                record.shares[site].far_rounds = self._records.far_rounds[site]
            return update
        samples = torch.tensor([float(held[site].share.samples) for site in sites])
        if config.exchange == "product":
            named = [unflatten_vector(vector, self._shapes) for vector in vectors]
            return flatten_tensors(mean_of_products(self.weights, named, samples.tolist()))
        stale = torch.tensor([staleness_weight(held[site].share.behind) for site in sites])
        return (samples / samples.sum() * stale) @ vectors

    def _exclude_site(self, site: str, reason: str) -> None:
        self._admission.exclude_site(site, reason)
        self._journal.note_excluded(site, reason)

    def _apply_update(self, record: RoundRecord, update: Tensor) -> None:
        """Move weights, and the controls beside them."""
        if self._controls:
            vectors = unflatten_vector(
                update, {**self._shapes, **{CONTROL + name: value for name, value in self._shapes.items()}}
            )
            for name, control in self._controls.items():
                control.add_(vectors[CONTROL + name], alpha=len(record.shares) / len(self._config.sites))
            update = flatten_tensors({name: vectors[name] for name in self._shapes})
        moved = self._server.compute_move(update)
        if not torch.isfinite(moved).all():
            raise FailedRoundError(f"round {record.number}: its step is not finite; lower federated.algorithm.rate")
        named = unflatten_vector(moved, self._shapes)
        record.norm = norm_of(named)
        self.weights = {name: weight + named[name] for name, weight in self.weights.items()}


def _make_sum_maker(
    terms: RunTerms, summed_by: Identity | AggregatorPort, fleet: Fleet, journal: RoundJournal, length: int
) -> SumMaker | KeeperSumMaker | EnclaveSumMaker:
    if terms.config.sums == "homomorphic":
        return KeeperSumMaker(terms, fleet, journal, length)
    if not isinstance(summed_by, Identity):
        return EnclaveSumMaker(terms, fleet, journal, summed_by)
    if terms.config.sums == "enclave":
        raise ConfigError('federated.sums = "enclave": no aggregator was started')
    return SumMaker(terms, summed_by, fleet, journal, length)
