"""One span for each request, sent to a collector by OTLP over HTTP from a thread of its own; it holds no text."""

import time
from collections.abc import Callable, Sequence

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode

from phalanx.closing import Closeable
from phalanx.serve.observe.config import TraceConfig
from phalanx.serve.observe.metrics import OPERATIONS, RequestOutcome

_SEND_TIMEOUT_S = 5.0
_SEND_EVERY_MS = 1000


class _CountedExporter(OTLPSpanExporter):
    """An exporter that says how many spans it has lost."""

    count_lost: Callable[[int], None]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.count_lost(len(spans))
        return result


def open_provider(
    config: TraceConfig, count_lost: Callable[[int], None], ids: IdGenerator | None = None
) -> TracerProvider:
    """Return a provider whose spans wait in a bounded queue and are sent by a thread of its own.

    Args:
        count_lost: Is told how many spans a collector did not take.
        ids: Makes the ids of traces and spans; random ones where it is left out.
    """
    session = requests.Session()
    # neither proxies nor keys out of the environment
    session.trust_env = False
    exporter = _CountedExporter(config.endpoint, timeout=_SEND_TIMEOUT_S, session=session)
    exporter.count_lost = count_lost
    provider = TracerProvider(
        sampler=TraceIdRatioBased(config.share),
        resource=Resource({"service.name": config.service}),
        shutdown_on_exit=False,
        id_generator=ids,
    )
    batches = BatchSpanProcessor(
        exporter,
        max_queue_size=config.max_waiting,
        max_export_batch_size=min(512, config.max_waiting),
        schedule_delay_millis=_SEND_EVERY_MS,
    )
    provider.add_span_processor(batches)
    return provider


class RequestTraces(Closeable):
    """The traces of one server.

    Args:
        count_lost: Is told how many spans a collector did not take.

    Guarantees:
        A request never waits for a collector and never fails by one: spans wait in a queue of bounded length, and those
        that find no place in it, or that the collector refuses, are lost.
    """

    def __init__(self, config: TraceConfig, count_lost: Callable[[int], None]) -> None:
        self._provider = open_provider(config, count_lost)
        self._tracer = self._provider.get_tracer("phalanx.serve")

    def send_request(self, outcome: RequestOutcome, digest: str) -> None:
        """Queue the span of a request that is over.

        Args:
            digest: Digest of the model; empty where it is not known.
        """
        end = time.time_ns()
        start = end - int(outcome.duration_s * 1e9)
        operation = OPERATIONS.get(outcome.route)
        attributes: dict[str, str | int | float | Sequence[str]] = {
            "http.route": outcome.route,
            "http.response.status_code": outcome.status,
        }
        if operation is not None:
            attributes |= {"gen_ai.operation.name": operation, "gen_ai.request.model": outcome.model}
            attributes |= {"gen_ai.provider.name": "phalanx", "phalanx.model.digest": digest}
        if outcome.prompt_tokens is not None:
            attributes["gen_ai.usage.input_tokens"] = outcome.prompt_tokens
        if outcome.completion_tokens is not None:
            attributes["gen_ai.usage.output_tokens"] = outcome.completion_tokens
        if outcome.mark:
            attributes["phalanx.mark"] = outcome.mark
        attributes["phalanx.filters"] = [*outcome.refusing_filters, *outcome.noting_filters]
        name = outcome.route if operation is None else f"{operation} {outcome.model}"
        span = self._tracer.start_span(name, kind=SpanKind.SERVER, attributes=attributes, start_time=start)
        if outcome.first_token_s is not None:
            span.add_event("gen_ai.first_token", timestamp=start + int(outcome.first_token_s * 1e9))
        if outcome.status >= 400:
            span.set_attribute("error.type", str(outcome.status))
        if outcome.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Send what waits, for some seconds at most; closing twice is harmless."""
        self._provider.shutdown()
