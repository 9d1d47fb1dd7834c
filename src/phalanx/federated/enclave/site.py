"""A site's side of rounds with an aggregator in an enclave: it appraises the aggregator, then seals its update."""

from safetensors.torch import save

from phalanx.errors import AggregationError
from phalanx.federated.admission import UpdateHeader, sign_update
from phalanx.federated.algorithms import Named
from phalanx.federated.carriers import messages as m
from phalanx.federated.enclave.aggregator import joined
from phalanx.federated.enclave.channel import SEAL, AggregatorAppraisal, bound_terms
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.sealing import SealedPlace, seal
from phalanx.security.aggregate import SumRefusal
from phalanx.security.crypto import Identity, digest_hex


class SealingSite:
    """One site, and the aggregator that its updates go to.

    Args:
        terms: Terms of the run, as the site knows them.

    Guarantees:
        An update leaves sealed for a key that fresh evidence binds to code that the policy accepts and to these terms;
        the owner and whatever carries it read nothing of it but its length.
    """

    def __init__(self, identity: Identity, terms: RunTerms) -> None:
        self._identity, self._terms = identity, terms
        self._appraisal = AggregatorAppraisal(terms)

    def phase(self, order: m.SumOrder, values: Named, samples: int, payload: bytes) -> bytes:
        """Ask for evidence, or appraise it and seal this site's own update of the order's round.

        Raises:
            AggregationError: The evidence does not pass.
        """
        if order.phase == "attest":
            return self._appraisal.nonce()
        if order.phase != "seal":
            raise AggregationError(SumRefusal.OUT_OF_PHASE, f"{order.phase}: invalid in rounds with an aggregator")
        public = self._appraisal.key(payload)
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
        return seal(place, public, joined(sign_update(header, self._identity), data))
