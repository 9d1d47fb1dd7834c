"""Simulators for users' own tests: whole runs in one process, with parties that lie or die, or a host that meddles."""

from phalanx.testing.actor import (
    Actor as Actor,
    OutgoingMessage as OutgoingMessage,
    TamperedRunner as TamperedRunner,
    WorkerCrash as WorkerCrash,
    crash_at as crash_at,
    rewrite_only as rewrite_only,
    tampering as tampering,
)
from phalanx.testing.clock import CompanyClock as CompanyClock, Stall as Stall
from phalanx.testing.company import CompanySession as CompanySession, MemoryCompany as MemoryCompany
from phalanx.testing.endpoint import (
    MemoryNetwork as MemoryNetwork,
    RewritingEndpoint as RewritingEndpoint,
)
from phalanx.testing.split import SplitScenario as SplitScenario, SplitSimulator as SplitSimulator
from phalanx.testing.tiny import random_batch as random_batch, tiny_run as tiny_run
