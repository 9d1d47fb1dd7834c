"""The reasons for which a message of a secure sum is refused, a word each."""

from enum import StrEnum


class SumRefusal(StrEnum):
    """Every reason of an `AggregationError`; the values appear in messages and logs."""

    MALFORMED = "malformed"
    FOREIGN_ROUND = "foreign_round"
    FOREIGN_TERMS = "foreign_terms"
    FOREIGN_PARTY = "foreign_party"
    SMALL_COHORT = "small_cohort"
    TOO_FEW = "too_few"
    OTHER_VIEW = "other_view"
    NOT_INCLUDED = "not_included"
    REPEATED_ROUND = "repeated_round"
    BAD_SHARE = "bad_share"
    BAD_INPUT = "bad_input"
    OUT_OF_PHASE = "out_of_phase"
