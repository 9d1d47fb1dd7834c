"""The audit log: decisions of a run and their reasons, in signed, chained lines that cannot change unnoticed."""

from phalanx.security.audit.access import (
    AccessLog as AccessLog,
    PersonSigner as PersonSigner,
    read_access_log as read_access_log,
)
from phalanx.security.audit.head import (
    HeadEntry as HeadEntry,
    KnownHead as KnownHead,
    read_head as read_head,
    sign_head as sign_head,
)
from phalanx.security.audit.leaves import LEAVES_FILE as LEAVES_FILE, LeafBatch as LeafBatch, read_batch as read_batch
from phalanx.security.audit.line import LogEntry as LogEntry, LogHead as LogHead
from phalanx.security.audit.log import AuditLog as AuditLog
from phalanx.security.audit.public_head import (
    MAX_BYTES as MAX_BYTES,
    PUBLIC_KINDS as PUBLIC_KINDS,
    PublicHead as PublicHead,
    PublicEntries as PublicEntries,
    describe_missing_entry as describe_missing_entry,
    read_public_head as read_public_head,
)
from phalanx.security.audit.verify import LogSummary as LogSummary, verify_log as verify_log
