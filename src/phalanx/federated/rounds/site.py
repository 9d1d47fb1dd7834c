"""A site: orders in, replies out. It trains once a round, keeps the update, and enters each secure sum once."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save

from phalanx.errors import AggregationError, FailedBatchError, FrameError, PrivacyBudgetError
from phalanx.federated.admission import UpdateHeader, sign_update
from phalanx.federated.algorithms import ALGORITHMS, CONTROL, ControlRule, LocalRule, Named, next_control
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import Payload
from phalanx.federated.enclave.aggregator import join_update
from phalanx.federated.enclave.channel import SEAL, AggregatorAppraisal, bound_terms
from phalanx.federated.local import LocalTrainer, LocalUpdate, RoundWeights, SiteScores
from phalanx.federated.rounds.keepers import KeeperSumSite
from phalanx.federated.rounds.released import ReleasedSums, UpdateLog
from phalanx.federated.rounds.terms import RunTerms, SiteBudget
from phalanx.federated.sealing import SealedPlace, seal_bytes
from phalanx.federated.vectors import Shapes, flatten_tensors, norm_of, num_values, shapes_of
from phalanx.security.aggregate import EnteredRounds, ExpectedRound, SumClient, SumRefusal
from phalanx.security.crypto import Identity, digest_hex
from phalanx.transport.tensors import UNREADABLE


class SealingSite:
    """One site, and the aggregator that its updates go to.

    Guarantees:
        An update leaves sealed for a key that fresh evidence binds to code that the policy accepts and to these terms;
        the owner and whatever carries it read nothing of it but its length. It leaves for one key alone: a second
        aggregator, started beside the first or without its log of rounds, would release a sum with other members.
    """

    def __init__(self, identity: Identity, terms: RunTerms, directory: Path) -> None:
        self._identity, self._terms = identity, terms
        self._appraisal = AggregatorAppraisal(terms)
        self._sealed_for = UpdateLog(directory / "sealed-updates.jsonl", "aggregator")

    def handle_phase(self, order: m.SumOrder, values: Named, samples: int, payload: bytes) -> bytes:
        """Ask for evidence, or appraise it and seal this site's own update of the order's round."""
        if order.phase == "attest":
            return self._appraisal.draw_nonce()
        if order.phase != "seal":
            raise AggregationError(SumRefusal.OUT_OF_PHASE, f"{order.phase}: invalid in rounds with an aggregator")
        public = self._appraisal.appraise_key(payload)
        if not self._sealed_for.note_update(order.model, order.round, digest_hex(public)):
            raise AggregationError(
                SumRefusal.REPEATED_ROUND,
                f"round {order.round}: this update went to another aggregator, which may have released a sum of it",
            )
        data = save(values)
        header = UpdateHeader(
            run=self._terms.digest,
            site=self._identity.name,
            round=order.round,
            model=order.model,
            values=digest_hex(data),
            samples=samples,
        )
        place = SealedPlace(SEAL, bound_terms(self._terms), order.round, order.model, self._identity.name)
        return seal_bytes(place, public, join_update(sign_update(header, self._identity), data))


Answer = tuple[m.SiteReply, Payload]


@dataclass(frozen=True)
class _Trained:
    """The update of a round, as it may leave."""

    round: int
    model: str
    values: Named
    reply: m.TrainedReply


class Site:
    """One site of a run, whatever carries its messages.

    Args:
        directory: Keeps the control variate of each round, for an algorithm that has them, and logs of sums.
        tell: Takes lines for the people of this site, about its own rounds; none of them leaves it.

    Guarantees:
        An update leaves within `max_norm`, signed for its run, round and model; with ``secure`` it leaves only in sums
        that the site itself finds large enough, and of one update in the company of one set of sites alone. An order
        that is asked again, for the same round and weights, gets the same update and trains nothing. An error is
        answered by one word. With ``privacy`` nothing that depends on the site's data leaves but in noisy sums, as many
        as its own budget pays for: no loss, no score, no failure. With private rows neither loss nor targets leave, and
        no round is trained that the site's ledger does not pay for.
    """

    def __init__(
        self,
        identity: Identity,
        terms: RunTerms,
        trainer: LocalTrainer,
        rounds: EnteredRounds,
        directory: Path,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._tell = tell
        self._identity, self._terms, self._trainer, self._rounds = identity, terms, trainer, rounds
        self._shapes: Shapes = trainer.trained_shapes()
        has_controls = terms.config.algorithm.kind == "scaffold"
        # by run: a site may take part in several from one directory
        controls = directory / "controls" / (terms.kept_as or terms.run)
        self._controls = RoundWeights(controls, self._shapes) if has_controls else None
        privacy, noisy = terms.config.privacy, terms.noisy_rounds(num_values(self._shapes))
        self._budget = None if privacy is None or noisy is None else SiteBudget(directory, noisy, privacy)
        # beside noise each sum is paid for, whoever is in it
        sums = terms.config.sums
        self._released = ReleasedSums(directory) if sums == "masked" and self._budget is None else None
        length = num_values(self._shapes)
        self._kept = KeeperSumSite(identity, terms, length, directory) if sums == "homomorphic" else None
        self._sealing = SealingSite(identity, terms, directory) if sums == "enclave" else None
        self._trained: _Trained | None = None
        self._sum: tuple[int, SumClient] | None = None

    def answer_order(self, order: m.SiteOrder, payload: Payload) -> Answer:
        """Fulfil one order."""
        culprit, message = "", ""
        try:
            if isinstance(order, m.TrainOrder):
                return self._train_round(order, payload)
            if isinstance(order, m.SumOrder):
                return self._take_phase(order, payload)
            if isinstance(order, m.MeasureOrder) and self._budget is None:
                return self._measure_weights(order, payload), b""
            reason: m.FaultReason = "failed"
        except FailedBatchError as exc:
            reason, message = "not_finite", str(exc)
        except PrivacyBudgetError as exc:
            # of noisy sums one is refused, of private rows every further round is
            reason, message = "refused" if self._terms.rows is None else "budget_spent", str(exc)
        except AggregationError as exc:
            reason, culprit, message = "refused", exc.culprit, str(exc)
        except FrameError as exc:
            reason, message = "refused", str(exc)
        if message:
            number = getattr(order, "round", None)
            self._tell(f"{self._round_label(number) if number else 'an order'}: not done: {message}")
        return m.SiteFault(ticket=order.ticket, reason=reason, culprit=culprit), b""

    def _measure_weights(self, order: m.MeasureOrder, payload: Payload) -> m.MeasuredReply:
        scores = self._trainer.measure_weights(self._exchanged_weights(payload))
        if not 0.0 <= scores.loss < math.inf:
            raise FailedBatchError(f"held-out loss {scores.loss}; lower the learning rate")
        self._tell(_describe_measurement(scores))
        return m.MeasuredReply(
            ticket=order.ticket, loss=scores.loss, num_targets=scores.num_targets, classes=scores.classes
        )

    def _train_round(self, order: m.TrainOrder, payload: Payload) -> Answer:
        if digest_hex(payload) != order.model:
            raise FrameError("weights: differ from the digest")
        trained = self._trained
        if trained is None or (trained.round, trained.model) != (order.round, order.model):
            trained = self._trained = self._train_anew(order, payload)
        reply = trained.reply.model_copy(update={"ticket": order.ticket})
        if self._terms.config.secure:
            return reply, b""
        values = save(trained.values)
        header = UpdateHeader(
            run=self._terms.digest,
            site=self._identity.name,
            round=trained.round,
            model=trained.model,
            values=digest_hex(values),
            samples=reply.samples,
        )
        return reply.model_copy(update={"header": sign_update(header, self._identity).decode("ascii")}), values

    def _train_anew(self, order: m.TrainOrder, payload: Payload) -> _Trained:
        config, began = self._terms.config, time.perf_counter()
        sent = self._payload_tensors(payload)
        start = {name: tensor for name, tensor in sent.items() if not name.startswith(CONTROL)}
        rule = ALGORITHMS[config.algorithm.kind].local(config.algorithm, start)
        of_all = {name.removeprefix(CONTROL): tensor for name, tensor in sent.items() if name.startswith(CONTROL)}
        own_control = {} if self._controls is None else self._controls.load_counted(order.counted)
        if isinstance(rule, ControlRule):
            rule.with_controls(of_all, own_control)
        update = self._local_update(order, start, rule)
        values = dict(update.delta)
        if isinstance(rule, ControlRule):
            own_next = next_control(own_control, of_all, update.delta, update.steps * order.rate)
            values |= {CONTROL + name: tensor - own_control[name] for name, tensor in own_next.items()}
        norm = norm_of(values)
        scaled = min(1.0, config.max_norm / max(norm, 1e-30))
        values = {name: (tensor * scaled if scaled < 1.0 else tensor).contiguous() for name, tensor in values.items()}
        if self._controls is not None:
            self._controls.save_round(
                order.round, {name: own_control[name] + values[CONTROL + name] for name in own_control}
            )
        samples = min(update.samples, config.max_samples) if config.weights == "samples" else 1
        tells = self._budget is None
        reply = m.TrainedReply(
            ticket=order.ticket,
            loss=update.loss if tells else None,
            num_targets=update.num_targets if tells else 0,
            samples=samples,
            scaled=scaled if tells else None,
            train_s=time.perf_counter() - began,
            epsilon=None if update.spent is None else update.spent.epsilon,
            rounds_left=None if update.spent is None else update.spent.rounds_left,
        )
        self._tell(
            f"{self._round_label(order.round)}: "
            f"{_describe_training(update, norm, config.max_norm)}{self._describe_spent(update)}"
        )
        return _Trained(order.round, order.model, values, reply)

    def _round_label(self, number: int) -> str:
        return f"round {number}/{self._terms.rounds}"

    def _describe_spent(self, update: LocalUpdate | None = None) -> str:
        """Describe the spending of this site's own privacy budgets; empty if it has none."""
        parts, rows, privacy = [], self._terms.rows, self._terms.config.privacy
        if update is not None and update.spent is not None and rows is not None:
            parts.append(f"  epsilon {update.spent.epsilon:.3f} of {rows.epsilon:g} spent of its rows")
        if self._budget is not None and privacy is not None:
            parts.append(f"  epsilon {self._budget.epsilon_spent:.3f} of {privacy.epsilon:g} spent of this site")
        return "".join(parts)

    def _local_update(self, order: m.TrainOrder, start: Named, rule: LocalRule) -> LocalUpdate:
        """Train; beside noise an update that failed is one of zeros, for a failure would tell of the data."""
        try:
            update = self._trainer.train_round(order.round, start, order.rate, rule)
        except FailedBatchError:
            if self._budget is None:
                raise
        else:
            # beside noise no loss is told
            loss = 0.0 if update.loss is None or self._budget is not None else update.loss
            if math.isfinite(norm_of(update.delta)) and abs(loss) <= m.MAX_LOSS:
                return update
            if self._budget is None:
                raise FailedBatchError(
                    f"update: holds NaN or infinity, or its loss of {update.loss} is beyond {m.MAX_LOSS:g}; lower the "
                    "learning rate"
                )
        return LocalUpdate({name: torch.zeros_like(tensor) for name, tensor in start.items()}, 1, 0.0, 1, 1)

    def _take_phase(self, order: m.SumOrder, payload: Payload) -> Answer:
        """Take one phase; only this site's own update of that very round and model is summed."""
        trained, message = self._trained, bytes(payload)
        if self._kept is not None and order.phase != "encrypt":
            return m.SumReply(ticket=order.ticket), self._kept.handle_phase(order, message)
        if (
            trained is None
            or (trained.round, trained.model) != (order.round, order.model)
            or not self._terms.config.secure
        ):
            raise FrameError("sum: belongs to another round or model than this site trained")
        if self._sealing is not None:
            sealed = self._sealing.handle_phase(order, trained.values, trained.reply.samples, message)
            return m.SumReply(ticket=order.ticket), sealed
        if self._kept is not None:
            values = flatten_tensors(trained.values).numpy().astype(np.float32, copy=False)
            return m.SumReply(ticket=order.ticket), self._kept.encrypt_update(order, values, message)
        if order.phase == "join":
            self._sum = (order.number, SumClient(self._identity, self._expected_round(trained), self._rounds))
        if self._sum is None or self._sum[0] != order.number:
            raise FrameError("sum: this site has not joined it")
        client = self._sum[1]
        if order.phase == "mask":
            values = flatten_tensors(trained.values).numpy().astype(np.float32, copy=False)
            noise = None if self._budget is None else self._budget.charge_noise(client.round_terms)
            if noise is not None:
                self._tell(f"{self._round_label(order.round)}: adds noise to its sum{self._describe_spent()}")
            deposit = client.mask_values(message, values, trained.reply.samples, noise)
            reply = m.SumReply(ticket=order.ticket, message=deposit.message.decode("ascii"))
            return reply, deposit.values.data.cast("B")
        if order.phase == "release" and self._released is not None:
            self._released.note_release(trained.model, trained.round, client.included_clients)
        steps = {
            "join": client.join_round,
            "share": client.share_secrets,
            "consent": client.sign_consent,
            "release": client.release_shares,
        }
        if order.phase not in steps:
            raise AggregationError(SumRefusal.OUT_OF_PHASE, f"{order.phase}: not a phase of a masked sum")
        return m.SumReply(ticket=order.ticket), steps[order.phase](message)

    def _expected_round(self, kept: _Trained) -> ExpectedRound:
        terms = self._terms
        return ExpectedRound(
            run=terms.run,
            run_digest=terms.digest,
            model_digest=kept.model,
            length=num_values(self._shapes),
            server=terms.owner,
            roster=terms.roster,
            minimum=terms.config.min_cohort,
        )

    def _exchanged_weights(self, payload: Payload) -> Named:
        return {name: tensor for name, tensor in self._payload_tensors(payload).items() if not name.startswith(CONTROL)}

    def _payload_tensors(self, payload: Payload) -> Named:
        try:
            tensors = load(bytes(payload))
        except UNREADABLE as exc:
            raise FrameError("weights: not in safetensors format") from exc
        due = dict(self._shapes)
        if self._terms.config.algorithm.kind == "scaffold":
            due |= {CONTROL + name: shape for name, shape in self._shapes.items()}
        if shapes_of(tensors) != dict(sorted(due.items())) or any(
            tensor.dtype != torch.float32 for tensor in tensors.values()
        ):
            raise FrameError("weights: not the tensors that this site trains")
        if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
            raise FrameError("weights: hold NaN or infinity")
        return tensors


def _describe_training(update: LocalUpdate, norm: float, max_norm: float) -> str:
    """Describe one round of this site."""
    loss = "" if update.loss is None else f"loss {update.loss:.4f} on {update.num_targets} targets  "
    scaled = f", scaled down to max_norm {max_norm:g}" if norm > max_norm else ""
    return f"{loss}update norm {norm:.4g}{scaled}"


def _describe_measurement(scores: SiteScores) -> str:
    """Describe the model's scores on this site's held-out rows."""
    if not scores.num_targets:
        return "measured: this site has no held-out rows"
    right = sum(one[2] for one in scores.classes)
    accuracy = f"  accuracy {right / scores.num_targets:.3f}" if scores.classes else ""
    return f"measured on its held-out rows: loss {scores.loss / scores.num_targets:.4f}{accuracy}"
