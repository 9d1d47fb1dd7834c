"""The reasons for which sealed frames and hellos are refused, a word each: a program can tell replays from alterations.

A word says what the frame *claims*: an attacker that alters a frame on the way chooses which of them is said. None of
them accepts anything.
"""

from enum import StrEnum


class SealRefusal(StrEnum):
    """Every reason of a `SealError`; the values appear in messages and logs."""

    MALFORMED = "malformed"
    OTHER_VERSION = "other_version"
    TRUNCATED = "truncated"
    TOO_LONG = "too_long"
    FOREIGN_SESSION = "foreign_session"
    FOREIGN_DIRECTION = "foreign_direction"
    FOREIGN_EPOCH = "foreign_epoch"
    REPLAYED = "replayed"
    OUT_OF_ORDER = "out_of_order"
    OTHER_TENSOR = "other_tensor"
    ALTERED = "altered"
    FOREIGN_RUN = "foreign_run"
    FOREIGN_CONFIG = "foreign_config"
    FOREIGN_ATTESTATION = "foreign_attestation"
    FOREIGN_PARTY = "foreign_party"
    FOREIGN_CHUNKING = "foreign_chunking"
    STALE_REPLY = "stale_reply"
    STALE_EPOCH = "stale_epoch"
    EXHAUSTED = "exhausted"
    CLOSED = "closed"
    FORKED = "forked"
