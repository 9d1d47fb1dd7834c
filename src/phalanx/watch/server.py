"""``phalanx watch`` as a process: it looks at the files of runs again and again, and serves their state."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from phalanx.errors import ConfigError
from phalanx.serve.access import ListenConfig, RequestBounds, bind_socket, make_server
from phalanx.watch.config import RunWatchConfig
from phalanx.watch.machine import MachineMeter, MachineReading, measure_processes
from phalanx.watch.page import WatchPage
from phalanx.watch.receivers import AlertReceivers, alert_object
from phalanx.watch.run_view import RunView
from phalanx.watch.security_events import SecurityCounts
from phalanx.watch.training_alerts import TrainingAlerts
from phalanx.watch.training_metrics import MetricsServer, RunCollector

if TYPE_CHECKING:
    from phalanx.watch.step_traces import StepTraces

_LOOK_EVERY_S = 1.0
_DRAIN_S = 3
MAX_RUNS = 16


@dataclass(frozen=True)
class WatchPlan:
    """What is watched, and how.

    Attributes:
        port: Port of the page, on loopback; None for no page, 0 lets the system choose.
        metrics_port: Port for Prometheus, on loopback; None for none.
    """

    run_dirs: Sequence[Path]
    port: int | None = 0
    metrics_port: int | None = None
    config: RunWatchConfig = field(default_factory=RunWatchConfig)


@dataclass(frozen=True)
class WatchAddresses:
    """Where a watcher can be reached; None for a thing that it does not serve.

    Attributes:
        link: Opens the page and signs in, once, within ten minutes.
    """

    url: str | None
    link: str | None
    metrics_url: str | None


class RunWatch:
    """All runs of one watcher; nothing in their directories is written.

    Raises:
        InputError: There is no run in a directory.
    """

    def __init__(self, run_dirs: Sequence[Path], config: RunWatchConfig, start: float) -> None:
        if not 1 <= len(run_dirs) <= MAX_RUNS:
            raise ConfigError(f"phalanx watch: {len(run_dirs)} run directories, expected 1 to {MAX_RUNS}")
        self.runs = [(view, TrainingAlerts(config.alerts, view, start)) for view in map(RunView, run_dirs)]
        self.lock = threading.Lock()
        self.intruders = SecurityCounts()
        self.num_lost_spans = 0
        self._meter = MachineMeter()
        self._traces = self._open_traces(config) if config.traces.endpoint else []

    def look_at_runs(self, tell: Callable[[Any, str, bool], None], now: float) -> dict[str, Any]:
        """Read the additions, check all rules, and return the state for pages.

        Args:
            tell: Takes an alert, the run's name, and whether it is over.
            now: Seconds since 1970.
        """
        with self.lock:
            for number, (view, alerts) in enumerate(self.runs):
                machine = None
                while True:
                    has_more = view.read_new()
                    if self._traces:
                        self._traces[number].send_steps(view.new_rows)
                        if view.summary is not None and not has_more:
                            self._traces[number].send_last_parties(view.summary)
                    if machine is None:
                        machine = self._read_machine(view)
                    begun, over = alerts.check_rules(now, machine)
                    for alert in begun:
                        tell(alert, view.name, False)
                    for alert in over:
                        tell(alert, view.name, True)
                    if not has_more:
                        break
            return self._describe(machine)

    def add_intruder(self, security_class: Any) -> None:
        """Count a request that a door of the watcher refused; the rules of the first run call somebody."""
        self.intruders.add_event(security_class)
        self.runs[0][1].add_intruder(time.time(), str(security_class))

    def _read_machine(self, view: RunView) -> MachineReading | None:
        with contextlib.suppress(OSError):
            return self._meter.read_machine(view.path, time.monotonic())
        return None

    def _describe(self, machine: MachineReading | None) -> dict[str, Any]:
        runs = []
        for view, alerts in self.runs:
            use = None if view.owner is None else measure_processes(view.owner)
            active = [alert_object(alert, view.name, is_over=False) for alert in alerts.active_alerts]
            runs.append({**view.describe(), "alerts": active, "processes": None if use is None else asdict(use)})
        return {
            "now": time.time(),
            "machine": None if machine is None else asdict(machine),
            "intruders": self.intruders.read_counts(),
            "lost_spans": self.num_lost_spans,
            "runs": runs,
        }

    def _open_traces(self, config: RunWatchConfig) -> "list[StepTraces]":
        try:
            from phalanx.watch.step_traces import StepTraces  # noqa: PLC0415 - an extra
        except ImportError as exc:
            raise ConfigError(
                "traces.endpoint: needs opentelemetry; install phalanx-train[traces], or remove it"
            ) from exc
        return [StepTraces(config.traces, view.run_id, self._count_lost) for view, _ in self.runs]

    def _count_lost(self, number: int) -> None:
        self.num_lost_spans += number

    def close(self) -> None:
        """Send the spans that wait, for some seconds at most."""
        for traces in self._traces:
            traces.close()


def look_once(run_dirs: Sequence[Path], config: RunWatchConfig) -> dict[str, Any]:
    """Return the state that a page would show now, and the alerts that hold; old events count too."""
    with contextlib.closing(RunWatch(run_dirs, config, 0.0)) as watch:
        return watch.look_at_runs(lambda *_: None, time.time())


def watch_runs(plan: WatchPlan, announce: Callable[[WatchAddresses], None]) -> None:
    """Watch until Ctrl-C or SIGTERM.

    Args:
        announce: Is told the addresses once they answer.

    Raises:
        InputError: There is no run in a directory.
        ConfigError: A port cannot be had, or an extra is missing.
        CertificateError: A secret's file cannot be read.
    """
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(contextlib.closing(RunWatch(plan.run_dirs, plan.config, time.time())))
        listen = None if plan.port is None else ListenConfig(port=plan.port)
        sock = None if listen is None else stack.enter_context(contextlib.closing(bind_socket(listen)))
        metrics = None
        if plan.metrics_port is not None:
            metrics = stack.enter_context(MetricsServer(RunCollector(watch.runs, watch.lock), plan.metrics_port))
        asyncio.run(_Watcher(watch, plan, announce, metrics).serve(sock, listen))


class _Watcher:
    """One watcher from its start to its end."""

    def __init__(
        self,
        watch: RunWatch,
        plan: WatchPlan,
        announce: Callable[[WatchAddresses], None],
        metrics: MetricsServer | None,
    ) -> None:
        self._watch, self._plan, self._announce = watch, plan, announce
        self._server: uvicorn.Server | None = None
        self._metrics_url = None if metrics is None else f"http://127.0.0.1:{metrics.port}/metrics"

    async def serve(self, sock: socket.socket | None, listen: ListenConfig | None) -> None:
        """Serve on a bound socket; without one look at the runs alone."""
        page = WatchPage([view for view, _ in self._watch.runs], self._watch.add_intruder, self._is_over)
        receivers = AlertReceivers(self._plan.config.alerts)
        if sock is None or listen is None:
            async with receivers:
                self._announce(WatchAddresses(None, None, self._metrics_url))
                await self._keep_looking(page, receivers)
            return
        server = self._server = make_server(page.app, listen, RequestBounds(), _DRAIN_S)
        async with receivers, self._look_beside(page, receivers):
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            while not (server.started or serving.done()):
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            self._announce(WatchAddresses(url, page.make_link(url), self._metrics_url))
            await serving

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    def _is_over(self) -> bool:
        return self._server is not None and self._server.should_exit

    @contextlib.asynccontextmanager
    async def _look_beside(self, page: WatchPage, receivers: AlertReceivers) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._keep_looking(page, receivers))
        # a page that stands still would look like a run without news
        looking.add_done_callback(lambda _: self._end_server())
        try:
            yield
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking

    async def _keep_looking(self, page: WatchPage, receivers: AlertReceivers) -> None:
        loop = asyncio.get_running_loop()

        def tell(alert: Any, run: str, is_over: bool) -> None:
            loop.call_soon_threadsafe(lambda: receivers.tell_receivers(alert, run, is_over=is_over))

        while True:
            state = await asyncio.to_thread(self._watch.look_at_runs, tell, time.time())
            page.snapshots.publish_state(state)
            await asyncio.sleep(_LOOK_EVERY_S)
