"""The timer of a step's named phases, in wall and in CPU seconds, and the names of all costs."""

import threading
import time
from collections.abc import Callable
from types import TracebackType

BUSY = "busy_wall"

WALL = "_wall"
"""Behind the name of a phase: its wall seconds since the report before."""
_PHASES = (
    *("audit", "commit", "compute", "journal", "optimizer", "screen", "send", "shadow_apply", "shadow_receive"),
    *("shadow_send", "state_digest", "wait"),
)
COSTS = frozenset(
    {*_PHASES, *(f"{name}{WALL}" for name in _PHASES), "process", "other_threads", "hashing", "signing", BUSY}
)
"""Everything that a party reports seconds of: the phases of its compute thread, and what cuts across them."""


def known_cost(name: str) -> str:
    """Return the name of a cost unchanged."""
    if name not in COSTS:
        raise ValueError("is no phase that a party has")
    return name


class PhaseTimer:
    """A timer that adds up seconds by phase name until they are taken.

    Phases may nest: the time of an inner phase is not counted in the outer one, so the phases of one
    thread add up to at most the step. Threads may time phases at once; then wall seconds of different
    threads overlap, and the default CPU clock, which counts the whole process, counts the others' work too.

    Args:
        cpu_clock: CPU seconds so far; `time.process_time` covers the worker threads of tensor kernels,
            `time.thread_time` only the calling thread.
        wall_clock: Wall seconds so far, monotonic.
    """

    def __init__(
        self,
        cpu_clock: Callable[[], float] = time.process_time,
        wall_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cpu_clock = cpu_clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._open = threading.local()
        self._wall: dict[str, float] = {}
        self._wall_before: dict[str, float] = {}
        self._cpu: dict[str, float] = {}

    def time_phase(self, name: str) -> "_Phase":
        """Return a context manager that adds the time spent in its body to `name`."""
        return _Phase(self, name)

    def add_seconds(self, name: str, wall_s: float, cpu_s: float = 0.0) -> None:
        """Add seconds that were measured elsewhere, for example by another process."""
        with self._lock:
            self._wall[name] = self._wall.get(name, 0.0) + wall_s
            self._cpu[name] = self._cpu.get(name, 0.0) + cpu_s

    def take_wall(self) -> dict[str, float]:
        """Return wall seconds by phase since the last `take`, in order of first use, and start anew."""
        with self._lock:
            taken, self._wall = self._wall, {}
            for name, seconds in taken.items():
                self._wall_before[name] = self._wall_before.get(name, 0.0) + seconds
        return taken

    def wall_s(self, *, without: str) -> float:
        """Wall seconds of all phases but one, since the beginning, whatever was taken."""
        with self._lock:
            entries = [*self._wall_before.items(), *self._wall.items()]
        return sum(seconds for name, seconds in entries if name != without)

    def take_cpu(self) -> dict[str, float]:
        """Return CPU seconds by phase since the last `take_cpu`, and start anew."""
        with self._lock:
            taken, self._cpu = self._cpu, {}
        return taken

    def read_clocks(self) -> tuple[float, float]:
        """Return the wall and the CPU clock, in seconds."""
        return self._wall_clock(), self._cpu_clock()

    def open_phases(self) -> list["_Phase"]:
        """Return the phases that the calling thread has open, outermost first."""
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        opened: list[_Phase] = self._open.stack
        return opened


class _Phase:
    """One open phase; what its inner phases took is subtracted when it ends."""

    __slots__ = ("_cpu_start", "_inner_cpu", "_inner_wall", "_name", "_timer", "_wall_start")

    def __init__(self, timer: PhaseTimer, name: str) -> None:
        self._timer = timer
        self._name = name
        self._inner_wall = self._inner_cpu = 0.0
        self._wall_start = self._cpu_start = 0.0

    def __enter__(self) -> None:
        self._timer.open_phases().append(self)
        self._wall_start, self._cpu_start = self._timer.read_clocks()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, cpu = self._timer.read_clocks()
        wall, cpu = wall - self._wall_start, cpu - self._cpu_start
        stack = self._timer.open_phases()
        stack.pop()
        if stack:
            stack[-1]._inner_wall += wall
            stack[-1]._inner_cpu += cpu
        self._timer.add_seconds(self._name, wall - self._inner_wall, cpu - self._inner_cpu)
