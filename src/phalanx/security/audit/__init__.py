"""The audit log: what a run decided and why, in lines that nobody can change unseen."""

from phalanx.security.audit.head import HeadEntry, KnownHead, read_head
from phalanx.security.audit.leaves import LEAVES_FILE, LeafBatch, LeafFile, read_batch
from phalanx.security.audit.line import Line, LogHead
from phalanx.security.audit.log import AuditLog
from phalanx.security.audit.merkle import merkle_root
from phalanx.security.audit.public_head import PublicHead, PublicLine, PublicLines
from phalanx.security.audit.verify import LogSummary, verify_log

__all__ = [
    "LEAVES_FILE",
    "AuditLog",
    "HeadEntry",
    "KnownHead",
    "LeafBatch",
    "LeafFile",
    "Line",
    "LogHead",
    "LogSummary",
    "PublicHead",
    "PublicLine",
    "PublicLines",
    "merkle_root",
    "read_batch",
    "read_head",
    "verify_log",
]
