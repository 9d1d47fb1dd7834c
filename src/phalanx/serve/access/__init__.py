"""Who may ask a server for what, and how much: keys, budgets, the door before every route, and the log of requests."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.access.access_directory import SERVER_FILE, Access
    from phalanx.serve.access.budgets import (
        BUDGETS_FILE,
        BudgetExceeded,
        Budgets,
        DayUsage,
        Reservation,
        read_usage_by_day,
    )
    from phalanx.serve.access.key_file import KeyLimits, KeyRecord, KeyTerms
    from phalanx.serve.access.key_guard import KeyGuard
    from phalanx.serve.access.key_store import KEYS_FILE, Caller, KeyStore
    from phalanx.serve.access.listener import ListenConfig, bind_socket, make_server
    from phalanx.serve.access.refusals import RequestRefused, error_body, send_refusal
    from phalanx.serve.access.request_bounds import RequestBounds
    from phalanx.serve.access.request_log import LOG_FOLDER, RequestFacts, RequestLog, verify_request_log

__all__ = [
    "BUDGETS_FILE",
    "KEYS_FILE",
    "LOG_FOLDER",
    "SERVER_FILE",
    "Access",
    "BudgetExceeded",
    "Budgets",
    "Caller",
    "DayUsage",
    "KeyGuard",
    "KeyLimits",
    "KeyRecord",
    "KeyStore",
    "KeyTerms",
    "ListenConfig",
    "RequestBounds",
    "RequestFacts",
    "RequestLog",
    "RequestRefused",
    "Reservation",
    "bind_socket",
    "error_body",
    "make_server",
    "read_usage_by_day",
    "send_refusal",
    "verify_request_log",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
