"""The secure sums of a round: the owner's side, phase after phase over the sites that are there.

A secure sum hides the single updates that a robust rule needs. With such a rule, sites are drawn into buckets that are
large enough to hide each of them; each bucket has a secure sum of its own, and the rule judges the buckets' means. f
lying sites spoil f buckets at most, so a rule must stand f of the number of buckets.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from phalanx.aggregators import AGGREGATORS, aggregate_updates
from phalanx.errors import AggregationError, ConfigError
from phalanx.federated.config import min_sites_left
from phalanx.federated.rounds.fleet import Fleet
from phalanx.federated.rounds.journal import ReleasedSum, RoundJournal, RoundRecord
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.rounds.walk import Exclude, SumWalk
from phalanx.federated.vectors import seed_of
from phalanx.security.aggregate import MIN_CONTRIBUTORS, CohortMember, SumRefusal, SumResult, SumServer, SumTerms
from phalanx.security.crypto import Identity


def bucket_sites(sites: Sequence[str], size: int, chance: bytes) -> list[tuple[str, ...]]:
    """Draw sites into buckets of `size` or one more.

    Args:
        size: At least 3, or as many as each site wants in a sum.
        chance: Bytes that no site knew when it joined, such as the digest of the round's model: the order is by its
            hashes.
    """
    if not MIN_CONTRIBUTORS <= size <= len(sites):
        raise ConfigError(f"buckets of {size} out of {len(sites)} sites: expected {MIN_CONTRIBUTORS} to {len(sites)}")
    order = sorted(sites, key=lambda site: hashlib.sha256(chance + site.encode()).digest())
    count = len(order) // size
    return [tuple(sorted(order[number::count])) for number in range(count)]


def robust_over_buckets(
    sums: Sequence[SumResult], rule: str, byzantine: int, before: tuple[str, ...] = (), seed: int = 0
) -> Tensor:
    """Apply a robust rule to the buckets' means.

    Args:
        sums: One sum per bucket, ``[buckets]``.
        rule: Name in `AGGREGATORS`.
        byzantine: Sites that may lie, each of which spoils one bucket at most.
        before: Names in `PRE_STEPS`, in order.
        seed: Decides the draws of these steps.
    """
    max_byzantine = AGGREGATORS[rule].max_byzantine(len(sums))
    if byzantine > max_byzantine:
        raise ConfigError(
            f"{len(sums)} buckets: {rule} tolerates at most {max_byzantine} spoiled buckets, but {byzantine} "
            "sites may lie; make smaller buckets, or ask more sites"
        )
    means = torch.stack([torch.from_numpy(bucket.mean_values()) for bucket in sums])
    return aggregate_updates(means, rule, byzantine, before, seed)


_SPOILED = (SumRefusal.BAD_INPUT, SumRefusal.BAD_SHARE)


class SumMaker:
    """Makes one update of the trained sites' updates without seeing any of them."""

    def __init__(self, terms: RunTerms, identity: Identity, fleet: Fleet, journal: RoundJournal, length: int) -> None:
        self._terms, self._identity, self._length = terms, identity, length
        self._noisy = terms.noisy_rounds(length)
        self._fleet, self._journal = fleet, journal

    def make_update(self, record: RoundRecord, model: str, exclude: Exclude) -> Tensor:
        """Sum the updates of the round's shares; sites that drop out meanwhile are moved to the excluded ones.

        Args:
            record: Record of the round; its shares are the sites that have trained.
            exclude: Told of a site that broke a sum, as its own signature shows.

        Raises:
            AggregationError: Too few sites are left in a sum, or a site has spoiled it; of sums that a rule looks at
                the others still count.
        """
        config, buckets = self._terms.config, self._draw_sums(record, model)
        if min_sites_left(min(len(bucket.cohort) for bucket in buckets)) < config.min_cohort:
            raise AggregationError(SumRefusal.TOO_FEW, f"{len(record.shares)} sites: too few for a sum")
        has_rule = config.bucket is not None and config.aggregator != "mean"
        sums, spoiled = list[SumResult](), 0
        for bucket in buckets:
            try:
                sums.append(self._run_sum(record, model, bucket, exclude))
            except AggregationError as exc:
                if not has_rule or exc.reason not in (*_SPOILED, SumRefusal.TOO_FEW):
                    raise
                # sites that left it may be honest, and as many liars in the other buckets as before
                if exc.reason in _SPOILED:
                    # one of its sites has lied, and can spoil no other bucket
                    spoiled += 1
                    record.left_out |= dict.fromkeys(bucket.members, "its sum was spoiled")
        contributors = {name for summed in sums for name in summed.contributors}
        for site in [site for site in record.shares if site not in contributors]:
            del record.shares[site]
            record.left_out.setdefault(site, "left the sum")
        if has_rule:
            byzantine = max(0, config.byzantine - spoiled)
            return robust_over_buckets(sums, config.aggregator, byzantine, config.before, seed_of(model))
        weight = sum(summed.weight for summed in sums)
        return torch.from_numpy(
            np.sum([summed.mean_values() * np.float32(summed.weight / weight) for summed in sums], axis=0)
        )

    def _draw_sums(self, record: RoundRecord, model: str) -> list[ReleasedSum]:
        """Draw the sites of each sum; sites of a sum that was about to be opened stay together.

        Without a site that was there, or with another one, the difference of a second sum would show one site's update,
        and honest sites release none.
        """
        config, sites = self._terms.config, sorted(record.shares)
        released = () if self._noisy is not None else self._journal.released_sums(record.number, model)
        sites_before = {site for earlier in released for site in earlier.members}
        if gone := sorted(sites_before - set(sites)):
            raise AggregationError(
                SumRefusal.TOO_FEW,
                f"{', '.join(gone)}: in a sum of this round that was not finished; the others join no second sum "
                "without it: restart that site",
            )
        rest = [site for site in sites if site not in sites_before]
        size = config.bucket or len(sites)
        if not released and len(sites) < max(size, config.min_cohort):
            raise AggregationError(SumRefusal.TOO_FEW, f"{len(sites)} sites trained; a sum needs {size}")
        fresh = [tuple(rest)] if not released else []
        if config.bucket:
            fresh = bucket_sites(rest, size, bytes.fromhex(model)) if len(rest) >= size else []
        return [*released, *(ReleasedSum(cohort, cohort) for cohort in fresh)]

    def _run_sum(self, record: RoundRecord, model: str, due: ReleasedSum, exclude: Exclude) -> SumResult:
        """Make one sum of a cohort, of which the members alone are asked."""
        config, number = self._terms.config, self._journal.next_sum()
        record.sums = (*record.sums, number)
        terms = SumTerms(
            run=self._terms.run,
            run_digest=self._terms.digest,
            model_digest=model,
            round=number,
            cohort=tuple(
                CohortMember(name=site, key=self._terms.roster[site].public_key.hex()) for site in sorted(due.cohort)
            ),
            length=self._length,
            clip=config.max_norm,
            max_weight=self._max_weight(len(due.cohort)),
            minimum=config.min_cohort,
        )
        server = SumServer(terms, self._identity)
        walk = SumWalk(self._fleet, record, (model, number), config.deadline_s)
        try:
            sites_left = walk.run_phase(
                "join", dict.fromkeys(due.members, server.invitation), lambda site, r, p: server.take_advert(p, site)
            )
            sites_left = walk.run_phase(
                "share",
                dict.fromkeys(sites_left, server.close_adverts()),
                lambda site, r, p: server.take_boxes(p, site),
            )
            delivered = server.close_boxes()
            sites_left = walk.run_phase(
                "mask",
                {site: delivered[site] for site in sites_left},
                lambda site, r, p: server.take_deposit(r.message.encode("utf-8"), np.frombuffer(p, "<u4"), site),
            )
            sites_left = walk.run_phase(
                "consent",
                dict.fromkeys(sites_left, server.close_deposits()),
                lambda site, r, p: server.take_consent(p, site),
            )
            self._journal.note_releasing(record.number, model, ReleasedSum(due.cohort, server.included_clients))
            walk.run_phase(
                "release",
                dict.fromkeys(sites_left, server.close_consents()),
                lambda site, r, p: server.take_release(p, site),
            )
            result = server.unmask_sum()
        except AggregationError as exc:
            if exc.culprit:
                exclude(exc.culprit, f"spoiled a sum: {exc.reason}")
            raise
        finally:
            for site, accusers in walk.accusers.items():
                # one of more than may lie is honest, and refuses what another one has signed only if it is wrong
                if site in terms.client_names and len(accusers) > max(1, terms.max_colluding, config.byzantine):
                    exclude(site, f"spoiled a sum: {len(accusers)} sites refused what it had signed for them")
        for site, what in result.liars.items():
            exclude(site, f"spoiled a sum: {what}")
        if self._noisy is None:
            _check_norm(result)
        return result

    def _max_weight(self, clients: int) -> int:
        if self._noisy is not None:
            return self._noisy.noisy_sum(clients).max_weight
        return self._terms.config.max_samples if self._terms.config.weights == "samples" else 1


def _check_norm(result: SumResult) -> None:
    """Return when clipped updates can have this sum."""
    norm = float(np.linalg.norm(result.total.astype(np.float64)))
    largest = result.weight * (result.encoding.max_level + math.sqrt(len(result.total)))
    if norm > largest:
        raise AggregationError(
            SumRefusal.BAD_INPUT,
            f"the sum has the norm {norm * result.encoding.step_size:.3g}, the maximum of clipped updates is "
            f"{largest * result.encoding.step_size:.3g}: a client's masks are not its own",
        )
