"""Metrics of training runs for Prometheus, read from their directories when somebody asks.

Labels are names of runs, parties, links, phases, event kinds and rules; each is bounded in length and number, and none
holds a word of a text.
"""

import ipaddress
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from phalanx.closing import Closeable
from phalanx.config import printable_text
from phalanx.errors import ConfigError
from phalanx.watch.run_view import RunView
from phalanx.watch.training_alerts import TRAINING_ACTIONS, TrainingAlerts

_MAX_LABEL = 80
_MAX_SERIES = 64
STATUSES = ("running", "completed", "failed", "interrupted", "gone", "unknown")
CHECK_KINDS = ("verdict", "evicted", "verdict_refused", "takeover", "lost", "replaced", "rolled_back", "batch_skipped")


@dataclass(frozen=True)
class TrainingMetric:
    """One metric: its name in Prometheus, and how it is read from a run.

    Attributes:
        kind: ``gauge``, ``counter`` (the name ends in ``_total`` in queries) or ``info`` (``_info``).
        labels: Names of its labels beside ``run``.
        read: Yields the values of the labels and the number.
        unit: Unit of measure, as UCUM code such as ``By``.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    unit: str
    read: Callable[[RunView, TrainingAlerts], Iterable[tuple[tuple[str, ...], float]]]

    @property
    def query_name(self) -> str:
        """Return the name that queries use."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


def _read_last(name: str) -> Callable[[RunView, TrainingAlerts], Iterator[tuple[tuple[str, ...], float]]]:
    def read(view: RunView, _: TrainingAlerts) -> Iterator[tuple[tuple[str, ...], float]]:
        values = view.history.last_values(name, 1000)
        if len(values):
            yield (), float(values[-1])

    return read


def _last_step(view: RunView, _: TrainingAlerts) -> Iterator[tuple[tuple[str, ...], float]]:
    if view.last_row is not None:
        yield (), float(view.last_row["step"])


def _last_time(view: RunView, _: TrainingAlerts) -> Iterator[tuple[tuple[str, ...], float]]:
    time = (view.last_row or {}).get("time")
    # a run directory may be somebody else's: one word in place of a number must not blind the scraper
    if isinstance(time, int | float):
        yield (), float(time)


def _read_count(of: Callable[[RunView], float]) -> Callable[[RunView, TrainingAlerts], Any]:
    return lambda view, _: [((), float(of(view)))]


def _read_group(prefix: str) -> Callable[[RunView, TrainingAlerts], Iterator[tuple[tuple[str, ...], float]]]:
    def read(view: RunView, _: TrainingAlerts) -> Iterator[tuple[tuple[str, ...], float]]:
        names = [name for name in view.history.curve_names if name.startswith(prefix)]
        for name in names[:_MAX_SERIES]:
            values = view.history.last_values(name, 1000)
            if len(values):
                yield (name.removeprefix(prefix),), float(values[-1])

    return read


def _read_parties(field: str) -> Callable[[RunView, TrainingAlerts], Iterator[tuple[tuple[str, ...], float]]]:
    def read(view: RunView, _: TrainingAlerts) -> Iterator[tuple[tuple[str, ...], float]]:
        for row in (() if view.peers is None else view.peers.parties)[:_MAX_SERIES]:
            value = getattr(row, field)
            if value is not None:
                yield (row.name,), float(value)

    return read


def _read_leaks(view: RunView, _: TrainingAlerts) -> Iterator[tuple[tuple[str, ...], float]]:
    for name in view.history.curve_names:
        if name.lower().startswith(("leak", "canary")) or "exposure" in name.lower():
            values = view.history.last_values(name, 1000)
            if len(values):
                yield (name,), float(values[-1])


TRAINING_METRICS: tuple[TrainingMetric, ...] = (
    TrainingMetric(
        "phalanx_run",
        "info",
        "1 for each run, with its random name and the digest of its config.",
        ("run_id", "config_digest"),
        "1",
        lambda view, _: [((view.run_id, view.config_digest), 1.0)],
    ),
    TrainingMetric(
        "phalanx_run_status",
        "gauge",
        "1 for the status that the run has, 0 for every other.",
        ("status",),
        "1",
        lambda view, _: [((status,), float(view.status == status)) for status in STATUSES],
    ),
    TrainingMetric("phalanx_step", "gauge", "Number of the last applied step.", (), "1", _last_step),
    TrainingMetric(
        "phalanx_steps_planned",
        "gauge",
        "Steps of the whole run.",
        (),
        "1",
        lambda view, _: [] if view.total_steps is None else [((), float(view.total_steps))],
    ),
    TrainingMetric(
        "phalanx_last_step_timestamp_seconds",
        "gauge",
        "When the last step was applied, in seconds since 1970; a stalled run is time() minus this.",
        (),
        "s",
        _last_time,
    ),
    TrainingMetric("phalanx_loss", "gauge", "Mean training loss of the last step.", (), "nat", _read_last("loss")),
    TrainingMetric(
        "phalanx_validation_perplexity",
        "gauge",
        "Newest perplexity of held-out text.",
        (),
        "1",
        _read_last("validation_perplexity"),
    ),
    TrainingMetric(
        "phalanx_grad_norm", "gauge", "Norm of the gradient before clipping.", (), "1", _read_last("grad_norm")
    ),
    TrainingMetric("phalanx_learning_rate", "gauge", "Learning rate of the last step.", (), "1", _read_last("lr")),
    TrainingMetric("phalanx_step_seconds", "gauge", "Time of the last step.", (), "s", _read_last("wall_s")),
    TrainingMetric(
        "phalanx_tokens_per_second",
        "gauge",
        "Tokens of the last step by its time.",
        (),
        "{token}/s",
        _read_last("tokens_per_s"),
    ),
    TrainingMetric(
        "phalanx_mfu", "gauge", "Share of the devices' peak, where it is known.", (), "1", _read_last("mfu")
    ),
    TrainingMetric(
        "phalanx_peak_memory_bytes",
        "gauge",
        "Peak memory of the owner's process, or of its GPU.",
        (),
        "By",
        _read_last("peak_memory_bytes"),
    ),
    TrainingMetric("phalanx_epsilon", "gauge", "Privacy budget that is spent.", (), "1", _read_last("epsilon")),
    TrainingMetric("phalanx_leak", "gauge", "Newest value of each leak curve.", ("curve",), "1", _read_leaks),
    TrainingMetric(
        "phalanx_phase_seconds", "gauge", "Seconds of the last step by phase.", ("phase",), "s", _read_group("phases.")
    ),
    TrainingMetric(
        "phalanx_tokens",
        "counter",
        "Tokens of all applied steps.",
        (),
        "{token}",
        _read_count(lambda view: view.tokens),
    ),
    TrainingMetric(
        "phalanx_audits",
        "counter",
        "Microbatches that were recomputed.",
        (),
        "1",
        _read_count(lambda view: view.num_audits),
    ),
    TrainingMetric(
        "phalanx_audit_alarms",
        "counter",
        "Results that differed from what was sent.",
        (),
        "1",
        _read_count(lambda view: view.num_alarms),
    ),
    TrainingMetric(
        "phalanx_non_finite_steps",
        "counter",
        "Steps with a figure that is no number.",
        (),
        "1",
        _read_count(lambda view: view.num_non_finite),
    ),
    TrainingMetric(
        "phalanx_run_events",
        "counter",
        "Decisions of the guard and about parties, by kind of event.",
        ("kind",),
        "1",
        lambda view, _: [((kind,), float(view.event_counts[kind])) for kind in CHECK_KINDS],
    ),
    TrainingMetric(
        "phalanx_security_events",
        "counter",
        "Security events by class.",
        ("class",),
        "1",
        lambda view, _: [((name,), float(count)) for name, count in view.security.read_counts().items()],
    ),
    TrainingMetric(
        "phalanx_link_bytes",
        "counter",
        "Bytes by link, as the owner counted them or the party claims.",
        ("link",),
        "By",
        lambda view, _: [((link,), float(size)) for link, size in view.link_bytes.most_common(_MAX_SERIES)],
    ),
    TrainingMetric(
        "phalanx_party_heard_timestamp_seconds",
        "gauge",
        "When the owner last heard of a party.",
        ("party",),
        "s",
        _read_parties("heard"),
    ),
    TrainingMetric(
        "phalanx_party_steps",
        "gauge",
        "Steps in which a party served or shadowed a stage.",
        ("party",),
        "1",
        _read_parties("steps"),
    ),
    TrainingMetric(
        "phalanx_training_alerts_active",
        "gauge",
        "Alerts that are not over, by rule.",
        ("rule",),
        "1",
        lambda _, alerts: [
            ((rule,), float(sum(alert.rule == rule for alert in alerts.active_alerts))) for rule in TRAINING_ACTIONS
        ],
    ),
    TrainingMetric(
        "phalanx_training_alerts",
        "counter",
        "Alerts that began, by rule.",
        ("rule",),
        "1",
        lambda _, alerts: [((rule,), float(count)) for rule, count in alerts.num_begun.items()],
    ),
)
"""Every metric of training; the board, the rules and the page of their names are compared with it by tests."""


class RunCollector:
    """Reads all metrics of all runs when somebody asks; `prometheus_client` calls it in a thread of its own."""

    def __init__(self, runs: Sequence[tuple[RunView, TrainingAlerts]], lock: threading.Lock) -> None:
        self._runs, self._lock = runs, lock

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its series."""
        with self._lock:
            for metric in TRAINING_METRICS:
                labels = ("run", *metric.labels)
                if metric.kind == "info":
                    yield self._collect_info(metric)
                    continue
                family_of = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = family_of(metric.name, metric.help, labels=labels)
                for view, alerts in self._runs:
                    for values, number in metric.read(view, alerts):
                        family.add_metric([_label_text(text) for text in (view.name, *values)], number)
                yield family

    def _collect_info(self, metric: TrainingMetric) -> InfoMetricFamily:
        family = InfoMetricFamily(metric.name, metric.help, labels=["run"])
        for view, alerts in self._runs:
            for values, _ in metric.read(view, alerts):
                family.add_metric([_label_text(view.name)], dict(zip(metric.labels, values, strict=True)))
        return family


class _QuietHandler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, *_: Any) -> None:
        """Print nothing for a request."""


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class MetricsServer(Closeable):
    """``GET /metrics`` on loopback, in threads of its own.

    Args:
        port: 0 lets the system choose.

    Raises:
        ConfigError: The port cannot be had.

    Guarantees:
        A page of somebody else cannot read it under a name of their own that they let point here: a request for
        another name than localhost or a plain address is refused.
    """

    def __init__(self, collector: RunCollector, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        show = make_wsgi_app(registry)

        def answer(environ: Any, start_response: Any) -> Any:
            if not is_loopback_name(environ.get("HTTP_HOST", "")):
                start_response("421 Misdirected Request", [("Content-Length", "0")])
                return [b""]
            return show(environ, start_response)

        try:
            self._server = make_server("127.0.0.1", port, answer, _ThreadingServer, handler_class=_QuietHandler)
        except OSError as exc:
            raise ConfigError(
                f"--prometheus: port {port} cannot be listened on ({exc.strerror}); choose another port"
            ) from exc
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def is_loopback_name(host: str) -> bool:
    """Whether the Host header of a request is localhost or a plain address, which nobody else can let point here."""
    name = re.sub(r":\d{1,5}\Z", "", host).removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return True


def _label_text(text: str) -> str:
    return printable_text(text, _MAX_LABEL)


def metric_table() -> str:
    """Return all metrics as a table in Markdown, for the page of their names."""
    rows = ["| metric | kind | labels beside `run` | unit (UCUM) | meaning |", "|---|---|---|---|---|"]
    for metric in TRAINING_METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.query_name}` | {metric.kind} | {labels} | `{metric.unit}` | {metric.help} |")
    return "\n".join(rows)
