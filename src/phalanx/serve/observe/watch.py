"""Everything that watches one server: it stands before the door, and sees each request once, when it is over."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.errors import ConfigError, DiskError
from phalanx.serve.access import Caller, RequestLog, RequestNotes, RequestRefused, collect_notes
from phalanx.serve.access.refusals import App, Message, Receive, Scope, Send
from phalanx.serve.observe.alerts import Alert, AlertWatch, Webhook
from phalanx.serve.observe.config import TraceConfig, WatchConfig
from phalanx.serve.observe.drift import read_baselines, write_baselines
from phalanx.serve.observe.metrics import CONTENT_TYPE, OPERATIONS, OTHER, Gauge, RequestOutcome, ServingMetrics

if TYPE_CHECKING:
    from phalanx.serve.observe.traces import RequestTraces

METRICS_ROUTE = "/metrics"
_CUT_OFF = 499
_ROUTES = frozenset({*OPERATIONS, "/v1/models", "/v1/messages/count_tokens", METRICS_ROUTE, "/", "/openapi.json"})
_ROUTES |= {"/chat/session", "/chat/session/end", "/health", "/health/live", "/health/ready"}
_log = logging.getLogger(__name__)
Measure = Callable[[], Awaitable[Mapping[str, float]]]


@dataclass(frozen=True)
class WatchedServer:
    """Facts about a watched server.

    Attributes:
        read_models: Returns the id of each model, at present, by its name in the request log.
        read_digests: Returns the digest of each model by its id; empty where others have its files.
        measure: Returns the perplexity of each model on the reference texts; None where it cannot.
    """

    directory: Path
    read_models: Callable[[], Mapping[str, str]]
    read_digests: Callable[[], Mapping[str, str]]
    gauges: Sequence[Gauge] = ()
    measure: Measure | None = None
    texts_digest: str = ""


@dataclass
class _Answer:
    """What is seen of one answer as it goes out."""

    status: int = _CUT_OFF
    is_stream: bool = False
    is_complete: bool = False
    first_body: float | None = None

    def see_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = dict(message.get("headers", ()))
            self.is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            if message.get("body") and self.first_body is None:
                self.first_body = time.monotonic()
            self.is_complete = not message.get("more_body", False)


class ServerWatch:
    """Metrics, traces and alerts of one server.

    Raises:
        CertificateError: The file of the webhook's secret cannot be read.

    Guarantees:
        It changes no answer: a gap in its figures is all that a fault leaves, and no request fails or waits for it.
    """

    def __init__(self, config: WatchConfig, server: WatchedServer, request_log: RequestLog) -> None:
        self._config, self._server, self._request_log = config, server, request_log
        self._alerts = AlertWatch(config.alerts, read_baselines(server.directory))
        self._saved = self._alerts.read_baselines()
        info = Gauge(
            "phalanx_model_info",
            "1 for each model, with the digest of its files.",
            ("model", "digest"),
            lambda: {(model, digest): 1.0 for model, digest in server.read_digests().items()},
        )
        active = Gauge("phalanx_alerts_active", "Alerts that are not over.", ("rule",), self._alerts.count_active)
        reference = Gauge(
            "phalanx_reference_perplexity",
            "Perplexity on the reference texts.",
            ("model",),
            self._alerts.read_perplexities,
        )
        self.metrics = ServingMetrics([info, active, reference, *server.gauges])
        traces = config.traces
        self._traces = _open_traces(traces, self.metrics) if traces.endpoint else None
        hook = config.alerts
        self._webhook = Webhook(hook.webhook, hook.webhook_secret_file) if hook.webhook else None

    @property
    def route(self) -> Route:
        """The route of the metrics, for an operator's key alone."""
        return Route(METRICS_ROUTE, self._show_metrics, methods=["GET"])

    async def _show_metrics(self, request: Request) -> Response:
        caller: Caller = request.scope["state"]["caller"]
        if caller.role != "operator":
            raise RequestRefused(403, "operator_required", "This route needs a key of role operator.")
        return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})

    def wrap_app(self, app: App) -> App:
        """Return an application that is watched; lifespan events pass."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            start, answer = time.monotonic(), _Answer()

            async def send_seen(message: Message) -> None:
                await send(message)
                answer.see_message(message)

            with collect_notes() as notes:
                try:
                    await app(scope, receive, send_seen)
                finally:
                    self._add_request(scope["path"], start, answer, notes)

        return watched

    def _add_request(self, path: str, start: float, answer: _Answer, notes: RequestNotes) -> None:
        now, facts = time.monotonic(), notes.facts
        first = notes.first_token or (answer.first_body if answer.is_stream else None)
        sizes = {} if facts is None else facts.sizes
        name = "" if facts is None else facts.model_digest
        outcome = RequestOutcome(
            route=path if path in _ROUTES else OTHER,
            model=self._server.read_models().get(name, OTHER),
            status=_status_of(answer, None if facts is None else facts.status),
            duration_s=now - start,
            first_token_s=None if first is None else first - start,
            prompt_tokens=sizes.get("prompt_tokens"),
            completion_tokens=sizes.get("completion_tokens"),
            verdicts=() if facts is None else tuple(facts.verdicts),
            filter_name=notes.filter_name,
            budget=notes.budget,
            mark="" if facts is None else facts.mark,
        )
        self.metrics.count_request(outcome)
        self._alerts.add_request(now, outcome, notes)
        if self._traces is not None and outcome.status != 401:
            self._traces.send_request(outcome, self._server.read_digests().get(outcome.model, ""))

    @contextlib.asynccontextmanager
    async def run_checks(self) -> AsyncIterator[None]:
        """Look at the rules again and again while the server runs."""
        tasks = [asyncio.create_task(self._keep_checking())]
        if self._server.measure is not None:
            tasks.append(asyncio.create_task(self._keep_measuring(self._server.measure)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close()

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(self._config.alerts.check_every_s)
            try:
                await self.check_rules()
            except DiskError as exc:
                # the server itself ends where the disk refuses
                _log.error("alerts are not recorded: %s", exc)

    async def _keep_measuring(self, measure: Measure) -> None:
        while True:
            for model, perplexity in (await measure()).items():
                self._alerts.set_perplexity(model, perplexity, self._server.texts_digest)
            await asyncio.sleep(self._config.alerts.reference.every_s)

    async def check_rules(self) -> None:
        """Look at the rules once, and tell the operator each change.

        Raises:
            DiskError: The disk refuses; the operator is told all the same.
        """
        begun, over = self._alerts.check_rules(time.monotonic())
        for alert in begun:
            self.metrics.count_alert(alert.rule)
            _log.error("%s", alert.describe())
        for alert in over:
            _log.warning("alert %s of %s is over", alert.rule, alert.subject)
        changes = [*((alert, False) for alert in begun), *((alert, True) for alert in over)]
        try:
            for alert, is_over in changes:
                self._record(alert, "over" if is_over else "begun")
            self._save_baselines()
        finally:
            if self._webhook is not None:
                # together: a receiver that is silent costs the time of one of them
                hook = self._webhook
                await asyncio.gather(*(hook.send_alert(alert, is_over=is_over) for alert, is_over in changes))

    def _record(self, alert: Alert, state: str) -> None:
        facts = {"rule": alert.rule, "subject": alert.subject, "state": state}
        self._request_log.record_event("alert", {**facts, "value": f"{alert.value:.4g}", "limit": f"{alert.limit:.4g}"})

    def _save_baselines(self) -> None:
        baselines = self._alerts.read_baselines()
        if baselines != self._saved:
            write_baselines(self._server.directory, baselines)
            self._saved = baselines

    async def _close(self) -> None:
        if self._webhook is not None:
            await self._webhook.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)


def _open_traces(config: TraceConfig, metrics: ServingMetrics) -> "RequestTraces":
    try:
        from phalanx.serve.observe.traces import RequestTraces  # noqa: PLC0415  -- an extra
    except ImportError as exc:
        raise ConfigError("traces.endpoint: needs opentelemetry; install phalanx-train[traces], or remove it") from exc
    return RequestTraces(config, metrics.count_lost_spans)


def _status_of(answer: _Answer, logged: int | None) -> int:
    """Return the status of an answer; that of the log where an answer that began well has failed later."""
    if not answer.is_complete:
        return _CUT_OFF
    return logged if answer.status == 200 and logged is not None else answer.status
