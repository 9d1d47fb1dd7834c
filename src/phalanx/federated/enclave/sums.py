"""The owner's side of rounds with an aggregator in an enclave: it forwards sealed updates that it cannot open."""

from collections.abc import Mapping

from torch import Tensor

from phalanx.errors import AggregationError
from phalanx.federated.carriers import messages as m
from phalanx.federated.enclave.aggregator import AggregatorPort
from phalanx.federated.rounds.fleet import Fleet
from phalanx.federated.rounds.journal import ReleasedSum, RoundJournal, RoundRecord
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.rounds.walk import Exclude, SumWalk
from phalanx.security.aggregate import SumRefusal


class EnclaveSumMaker:
    """Makes one update of the trained sites' updates, by an aggregator in an enclave.

    Args:
        journal: Gives each sum a number, and remembers which sites the aggregator was asked for.
    """

    def __init__(self, terms: RunTerms, fleet: Fleet, journal: RoundJournal, aggregator: AggregatorPort) -> None:
        self._terms, self._fleet, self._journal, self._aggregator = terms, fleet, journal, aggregator

    def make_update(self, record: RoundRecord, model: str, exclude: Exclude) -> Tensor:
        """Have the round's updates aggregated; refused sites are moved to the excluded ones."""
        del exclude
        number = self._journal.next_sum()
        record.sums = (*record.sums, number)
        walk = SumWalk(self._fleet, record, (model, number), self._terms.config.deadline_s)
        sealed = self._collect_sealed(record, model, walk)
        outcome = self._aggregator.aggregate_updates(record.number, model, sealed)
        # the aggregator's own book holds through a crash before this line; this one says whom to wait for
        self._journal.note_releasing(record.number, model, ReleasedSum(tuple(sorted(sealed)), outcome.members))
        record.left_out |= outcome.refused
        for site in [site for site in record.shares if site not in outcome.members]:
            del record.shares[site]
            record.left_out.setdefault(site, "left the sum")
        return outcome.update

    def _collect_sealed(self, record: RoundRecord, model: str, walk: SumWalk) -> Mapping[str, bytes]:
        """Have each site appraise the aggregator, and return its sealed update."""
        sums = self._journal.released_sums(record.number, model)
        asked = [site for site in sorted(record.shares) if not sums or site in sums[0].members]
        evidence: dict[str, bytes] = {}

        def attest(site: str, reply: m.SumReply, nonce: bytes) -> str:
            evidence[site] = b"".join(self._aggregator.get_evidence(nonce))
            return site

        sealed: dict[str, bytes] = {}

        def take(site: str, reply: m.SumReply, payload: bytes) -> str:
            sealed[site] = payload
            return site

        walk.run_phase("attest", dict.fromkeys(asked, b""), attest)
        walk.run_phase("seal", evidence, take)
        if gone := sorted({site for released in sums for site in released.members} - sealed.keys()):
            raise AggregationError(
                SumRefusal.TOO_FEW,
                f"{', '.join(gone)}: in a sum of this round that was not finished; the aggregator makes no second "
                "sum without it: restart that site",
            )
        return sealed
