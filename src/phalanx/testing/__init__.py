"""Simulators for users' own tests: whole runs in one process, with parties that lie or die, or a host that meddles."""

from phalanx.testing.actor import (
    Actor,
    OutgoingMessage,
    Rewrite,
    TamperedRunner,
    WorkerCrash,
    crash_at,
    only,
    tampering,
)
from phalanx.testing.clock import CompanyClock, Stall
from phalanx.testing.company import CompanySession, MemoryCompany
from phalanx.testing.endpoint import MemoryNetwork, MemoryWire, RewritingEndpoint
from phalanx.testing.split import SplitScenario, SplitSimulator
from phalanx.testing.tiny import random_batch, tiny_run

__all__ = [
    "Actor",
    "CompanyClock",
    "CompanySession",
    "MemoryCompany",
    "MemoryNetwork",
    "MemoryWire",
    "OutgoingMessage",
    "Rewrite",
    "RewritingEndpoint",
    "SplitScenario",
    "SplitSimulator",
    "Stall",
    "TamperedRunner",
    "WorkerCrash",
    "crash_at",
    "only",
    "random_batch",
    "tampering",
    "tiny_run",
]
