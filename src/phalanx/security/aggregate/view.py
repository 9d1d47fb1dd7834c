"""What must hold before a client masks its values, gives its word or gives out shares: pure checks, and whole defences.

Each of these stands against an attack of the server that wins without it (tests/security/aggregate).
"""

from collections.abc import Collection, Mapping, Sequence

from phalanx.errors import AggregationError
from phalanx.security.aggregate.messages import Consent, SumRefusal
from phalanx.security.aggregate.terms import SumTerms

Graph = Mapping[str, tuple[str, ...]]


def check_view(terms: SumTerms, graph: Graph, own: str, present: Collection[str]) -> None:
    """Return when enough clients, and enough of one client's neighbours, are there.

    Raises:
        AggregationError: There are too few, or the client itself is missing.
    """
    if own not in present:
        raise AggregationError(SumRefusal.NOT_INCLUDED, f"{own}: is not among those that are said to be here")
    if len(present) < terms.consent_threshold:
        raise AggregationError(
            SumRefusal.TOO_FEW,
            f"{len(present)} of {len(terms.cohort)} clients are here, {terms.consent_threshold} are needed",
        )
    _check_neighbours(terms, graph, own, frozenset(present))


def check_included(terms: SumTerms, graph: Graph, sharers: Collection[str], included: Collection[str]) -> None:
    """Return when a sum over these clients hides each of them."""
    names = frozenset(included)
    if not names <= set(sharers):
        raise AggregationError(SumRefusal.OTHER_VIEW, "deposits: a client is said to be in the sum that never shared")
    if len(names) < terms.consent_threshold:
        raise AggregationError(
            SumRefusal.TOO_FEW,
            f"{len(names)} of {len(terms.cohort)} clients in the sum, {terms.consent_threshold} are needed",
        )
    for name in names:
        _check_neighbours(terms, graph, name, names)


def check_consents(
    terms: SumTerms, included: Mapping[str, str], included_digest: str, consents: Sequence[Consent]
) -> None:
    """Return when more than two thirds of the cohort gave their word for one and the same sum.

    Two such thirds for two sums would have an honest client in common, which gives its word once.
    """
    senders = {consent.sender for consent in consents}
    if len(senders) != len(consents) or not senders <= included.keys():
        raise AggregationError(SumRefusal.MALFORMED, "consents: expected each sender once, all of them in the sum")
    if any(consent.included != included_digest for consent in consents):
        raise AggregationError(SumRefusal.OTHER_VIEW, "consents: the server shows others another sum")
    if len(senders) < terms.consent_threshold:
        raise AggregationError(
            SumRefusal.TOO_FEW, f"{len(senders)} of {len(terms.cohort)} consents, {terms.consent_threshold} are needed"
        )


def _check_neighbours(terms: SumTerms, graph: Graph, name: str, present: frozenset[str]) -> None:
    num_present = sum(neighbour in present for neighbour in graph[name])
    if num_present < terms.graph_degree.shares:
        raise AggregationError(
            SumRefusal.TOO_FEW,
            f"{name}: {num_present} of its neighbours are here, {terms.graph_degree.shares} are needed",
        )
