"""The running costs of a process, as it tells the owner with each applied step."""

import time
from collections.abc import Iterable, Mapping

from phalanx.pipeline.config import OWNER
from phalanx.telemetry import PhaseTimer
from phalanx.transport import Endpoint

BUSY = "busy_wall"

COSTS = frozenset(
    {
        "audit",
        "commit",
        "compute",
        "journal",
        "optimizer",
        "screen",
        "send",
        "shadow_apply",
        "shadow_receive",
        "shadow_send",
        "state_digest",
        "wait",
        "process",
        "hashing",
        "signing",
        BUSY,
    }
)
"""Everything that a party reports seconds of: the phases of its compute thread, and what cuts across them."""


def known_cost(name: str) -> str:
    """Return the name of a cost unchanged.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in COSTS:
        raise ValueError("is no phase that a party has")
    return name


class BytesByLink:
    """Bytes of frames by link, since they were last taken; ``a>b`` is what a sent to b."""

    def __init__(self, owner: Endpoint) -> None:
        self._owner = owner
        self._last: dict[str, int] = {}

    def take(self, reported: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
        """Return the bytes sent since the last call: the owner's as it saw them, others' as their senders say."""
        totals: dict[str, int] = {}
        for party, sent in reported.items():
            if party != OWNER:
                totals |= {f"{party}>{peer}": size for peer, size in sent.items()}
        totals |= {f"{OWNER}>{peer}": size for peer, size in self._owner.bytes_sent.items()}
        totals |= {f"{peer}>{OWNER}": size for peer, size in self._owner.bytes_received.items()}
        moved = {link: total - self._last.get(link, 0) for link, total in totals.items()}
        self._last = totals
        return moved


def claimed_links(links: Iterable[str]) -> tuple[str, ...]:
    """Those of the links of which the owner sees neither end: what crosses them is what its sender says."""
    return tuple(sorted(link for link in links if OWNER not in link.split(">")))


class RunningCosts:
    """CPU seconds by purpose and bytes by receiver, both since the process started.

    The phases of the compute thread, plus ``process`` (every thread, the transport's included) and, cutting
    across both, ``hashing`` and ``signing`` of frames. `BUSY` is wall time: that in which it did not wait.
    """

    def __init__(self, timer: PhaseTimer, endpoint: Endpoint) -> None:
        self._timer = timer
        self._endpoint = endpoint
        self._by_phase: dict[str, float] = {}

    def __call__(self) -> tuple[dict[str, float], dict[str, int]]:
        """Totals so far: seconds by purpose, and bytes of frames by the receiver that signed for them."""
        for name, seconds in self._timer.take_cpu().items():
            self._by_phase[name] = self._by_phase.get(name, 0.0) + seconds
        totals = {
            **self._by_phase,
            "process": time.process_time(),
            "hashing": self._endpoint.seconds_hashing,
            "signing": self._endpoint.seconds_signing,
            BUSY: self._timer.wall_s(without="wait"),
        }
        return totals, dict(self._endpoint.bytes_sent)
