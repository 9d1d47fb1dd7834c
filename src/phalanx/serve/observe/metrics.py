"""Metrics of a server for Prometheus, by the GenAI conventions of OpenTelemetry where they have a name.

Labels are taken from tables that are fixed when the server starts, so the number of series is bounded whatever
clients send: no label has a key, an owner, an address or a word of a text.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily

from phalanx.serve.access.key_file import KeyLimits
from phalanx.serve.filters.table import INPUTS, OUTPUTS

OTHER = "other"
CONTENT_TYPE = CONTENT_TYPE_LATEST
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Name of the operation, by the conventions; other routes have no model."""
FILTERS = frozenset({*INPUTS, *OUTPUTS, "utf8", "size"})
_LIMITS = frozenset(KeyLimits.model_fields)
_STATUSES = frozenset({200, 400, 401, 403, 404, 405, 408, 413, 414, 415, 422, 429, 431, 499, 500, 502, 503})
# buckets of the conventions, https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/
_DURATION_S = tuple(0.01 * 2**n for n in range(14))
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**n for n in range(14))
_MODEL = ("gen_ai_operation_name", "gen_ai_request_model")


@dataclass(frozen=True)
class Gauge:
    """A number that is asked for when the metrics are read.

    Attributes:
        read: Returns the number by the values of the labels.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[], Mapping[tuple[str, ...], float]]


@dataclass(frozen=True)
class RequestOutcome:
    """One request that is over.

    Attributes:
        route: Its path, or ``other``.
        model: Id of its model, or ``other``.
        status: HTTP status; 499 where the answer was cut off.
        first_token_s: Seconds until its first token; None where none was written.
        prompt_tokens: None where no text was read; the same for `completion_tokens`.
        verdicts: What filters said, as the log has it.
        filter_name: The filter that refused it; empty for none.
        budget: The budget that refused it; where none is named, a refusal counts as concurrency.
        mark: Kind of watermark; empty where no text was made.
    """

    route: str
    model: str
    status: int
    duration_s: float
    first_token_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    verdicts: tuple[str, ...] = ()
    filter_name: str = ""
    budget: str = ""
    mark: str = ""

    @property
    def token_s(self) -> float | None:
        """Seconds for each token behind the first; None where there is none."""
        if self.first_token_s is None or (self.completion_tokens or 0) < 2:
            return None
        return max(0.0, self.duration_s - self.first_token_s) / ((self.completion_tokens or 0) - 1)

    @property
    def refusing_filters(self) -> list[str]:
        """Names of the filters that refused the prompt or the answer."""
        words = [verdict.removesuffix(": refused") for verdict in self.verdicts]
        return list(dict.fromkeys(word for word in (self.filter_name, *words) if word in FILTERS))

    @property
    def noting_filters(self) -> list[str]:
        """Names of the filters that let a text pass with a note."""
        words = {verdict.partition(":")[0] for verdict in self.verdicts if ":" in verdict}
        return sorted(words & FILTERS - set(self.refusing_filters))


class _Gauges:
    def __init__(self, gauges: Iterable[Gauge]) -> None:
        self._gauges = tuple(gauges)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield each gauge as it is now."""
        for gauge in self._gauges:
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
            for labels, value in gauge.read().items():
                family.add_metric(labels, value)
            yield family


class ServingMetrics:
    """The metrics of one server, in a registry of its own.

    Args:
        gauges: Numbers of the server that are read when somebody asks.
    """

    def __init__(self, gauges: Iterable[Gauge]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Gauges(gauges))
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from a request's first byte to the last one of its answer.",
            (*_MODEL, "error_type"),
            buckets=_DURATION_S,
            registry=registry,
        )
        self._first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from a request's first byte to the first token of its answer.",
            _MODEL,
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time for each token behind the first.",
            _MODEL,
            buckets=_TOKEN_S,
            registry=registry,
        )
        self._usage = Histogram(
            "gen_ai_client_token_usage",
            "Tokens of a request that were read (input) and written (output).",
            (*_MODEL, "gen_ai_token_type"),
            buckets=_TOKENS,
            registry=registry,
        )
        self._requests = Counter(
            "phalanx_requests", "Requests by route and HTTP status.", ("route", "status"), registry=registry
        )
        self._refusals = Counter(
            "phalanx_filter_refusals", "Texts that a filter refused.", ("filter",), registry=registry
        )
        self._remarks = Counter(
            "phalanx_filter_notes", "Texts that passed with a note of a filter.", ("filter",), registry=registry
        )
        self._budgets = Counter(
            "phalanx_budget_refusals", "Requests that a budget refused.", ("budget",), registry=registry
        )
        self._marks = Counter("phalanx_marked_texts", "Texts by kind of watermark.", ("mark",), registry=registry)
        self._alerts = Counter("phalanx_alerts", "Alerts that began, by rule.", ("rule",), registry=registry)
        self._lost_spans = Counter("phalanx_lost_spans", "Spans of traces that were not sent.", registry=registry)

    def count_request(self, outcome: RequestOutcome) -> None:
        """Count a request that is over."""
        status = str(outcome.status) if outcome.status in _STATUSES else OTHER
        self._requests.labels(outcome.route, status).inc()
        for name in outcome.refusing_filters:
            self._refusals.labels(name).inc()
        for name in outcome.noting_filters:
            self._remarks.labels(name).inc()
        if outcome.status == 429:
            self._budgets.labels(outcome.budget if outcome.budget in _LIMITS else "concurrency").inc()
        if outcome.mark:
            kind = outcome.mark.split(" ", 1)[0].rstrip(",")
            self._marks.labels(kind if kind in {"gumbel", "bias", "no"} else OTHER).inc()
        self._time_request(outcome, status)

    def _time_request(self, outcome: RequestOutcome, status: str) -> None:
        operation = OPERATIONS.get(outcome.route)
        if operation is None or outcome.status == 401:
            return
        names = (operation, outcome.model)
        self._duration.labels(*names, "" if outcome.status == 200 else status).observe(outcome.duration_s)
        if outcome.first_token_s is not None:
            self._first_token.labels(*names).observe(outcome.first_token_s)
        if outcome.token_s is not None:
            self._token.labels(*names).observe(outcome.token_s)
        for kind, count in (("input", outcome.prompt_tokens), ("output", outcome.completion_tokens)):
            if count is not None:
                self._usage.labels(*names, kind).observe(count)

    def count_alert(self, rule: str) -> None:
        """Count an alert that begins."""
        self._alerts.labels(rule).inc()

    def count_lost_spans(self, number: int) -> None:
        """Count spans that were dropped or refused by the collector."""
        self._lost_spans.inc(number)

    def names(self) -> set[str]:
        """Return the names of all series, as queries write them."""
        names = set()
        for family in self._registry.collect():
            names |= {family.name, *(sample.name for sample in family.samples)}
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
            names |= {family.name + suffix for suffix in suffixes.get(family.type, ())}
        return names

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
