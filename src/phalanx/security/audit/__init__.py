"""The audit log: decisions of a run and their reasons, in signed, chained lines that cannot change unnoticed."""

from phalanx.security.audit.head import HeadEntry, KnownHead, read_head
from phalanx.security.audit.leaves import LEAVES_FILE, LeafBatch, read_batch
from phalanx.security.audit.line import Line, LogHead
from phalanx.security.audit.log import AuditLog
from phalanx.security.audit.public_head import (
    MOST_BYTES,
    PUBLIC_KINDS,
    PublicHead,
    PublicLines,
    lacks,
    read_public_head,
)
from phalanx.security.audit.verify import LogSummary, verify_log

__all__ = [
    "LEAVES_FILE",
    "MOST_BYTES",
    "PUBLIC_KINDS",
    "AuditLog",
    "HeadEntry",
    "KnownHead",
    "LeafBatch",
    "Line",
    "LogHead",
    "LogSummary",
    "PublicHead",
    "PublicLines",
    "lacks",
    "read_batch",
    "read_head",
    "read_public_head",
    "verify_log",
]
