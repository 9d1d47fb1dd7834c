"""What a process of a run has cost so far, as it tells the owner with each applied step."""

import time

from phalanx.telemetry import PhaseTimer
from phalanx.transport import Endpoint


class RunningCosts:
    """CPU seconds by purpose and bytes by receiver, both since the process started.

    The phases of the compute thread, plus ``process`` (every thread, the transport's included) and, cutting
    across both, ``hashing`` and ``signing`` of frames.
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
        }
        return totals, dict(self._endpoint.bytes_sent)
