"""Secure sums: a server learns the sum of many clients' values and nothing else of them. Loads no torch.

SumTerms                     what a round is about, signed by the server
SumClient, SumServer         one side each of one round: messages in, messages out, no I/O
EnteredRounds                no round twice

The protocol, its adversary and its limits: docs/secure_aggregation.md.
"""

from phalanx.security.aggregate.client import (
    ExpectedRound as ExpectedRound,
    SumClient as SumClient,
)
from phalanx.security.aggregate.encoding import RingEncoding as RingEncoding, Values as Values, Words as Words
from phalanx.security.aggregate.graph import (
    degree_of as degree_of,
    max_colluding as max_colluding,
    threshold_of as threshold_of,
)
from phalanx.security.aggregate.messages import SumRefusal as SumRefusal
from phalanx.security.aggregate.rounds import EnteredRounds as EnteredRounds, RoundFile as RoundFile
from phalanx.security.aggregate.server import SumResult as SumResult, SumServer as SumServer
from phalanx.security.aggregate.terms import (
    MIN_CONTRIBUTORS as MIN_CONTRIBUTORS,
    CohortMember as CohortMember,
    SumTerms as SumTerms,
)
