"""The audit log: what a run decided and why, in lines that nobody can change unseen."""

from phalanx.security.audit.line import LogHead
from phalanx.security.audit.log import AuditLog
from phalanx.security.audit.verify import LogSummary, verify_log

__all__ = ["AuditLog", "LogHead", "LogSummary", "verify_log"]
