"""Secure sums: a server learns the sum of many clients' values and nothing else of them. Loads no torch.

SumTerms                     what a round is about, signed by the server
SumClient, SumServer         one side each of one round: messages in, messages out, no I/O
EnteredRounds                no round twice

The protocol, its adversary and its limits: docs/secure_aggregation.md.
"""

from phalanx.security.aggregate.client import ExpectedRound, MaskedDeposit, SumClient, SumPhase
from phalanx.security.aggregate.encoding import RingEncoding, Values, Words
from phalanx.security.aggregate.graph import Degree, degree_of, most_colluding, threshold_of
from phalanx.security.aggregate.messages import SumRefusal
from phalanx.security.aggregate.rounds import EnteredRounds, RoundFile
from phalanx.security.aggregate.server import ServerPhase, SumResult, SumServer
from phalanx.security.aggregate.terms import LEAST_CONTRIBUTORS, CohortMember, SumTerms

__all__ = [
    "LEAST_CONTRIBUTORS",
    "CohortMember",
    "Degree",
    "EnteredRounds",
    "ExpectedRound",
    "MaskedDeposit",
    "RingEncoding",
    "RoundFile",
    "ServerPhase",
    "SumClient",
    "SumPhase",
    "SumRefusal",
    "SumResult",
    "SumServer",
    "SumTerms",
    "Values",
    "Words",
    "degree_of",
    "most_colluding",
    "threshold_of",
]
