"""Alerts: rules over the requests of a server, each with the sentence that tells the operator what to do."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx2

from phalanx.security.crypto import read_private
from phalanx.serve.access.request_notes import RequestNotes
from phalanx.serve.observe.config import AlertRules
from phalanx.serve.observe.drift import Baselines, ModelBaseline, TrafficDrift
from phalanx.serve.observe.metrics import OPERATIONS, OTHER, RequestOutcome
from phalanx.serve.observe.walks import PromptWalks, WindowCounts

_log = logging.getLogger(__name__)
_WEBHOOK_TIMEOUT_S = 5.0
_ALL = ""
"""All models together; no model has this id."""
ACTIONS: dict[str, str] = {
    "errors": "Read the server's log for the fault, and look at memory and queue; if the model is at fault, "
    "phalanx incident quarantine --model NAME, then rollback.",
    "guessing": "Somebody tries keys: find the addresses in the request log (kind refused) and close them at the "
    "firewall; if a real key may have leaked, phalanx incident quarantine --key KEY.",
    "abuse": "Look at the key's filter verdicts in the request log, and ask its owner; if the answer does not "
    "satisfy, phalanx incident quarantine --key KEY.",
    "extraction": "Ask the key's owner what the requests are for. An evaluation: add the key to "
    "alerts.extraction.exempt_keys. Otherwise phalanx incident quarantine --key KEY, and lower the limits of keys.",
    "drift_prompts": "Clients send other prompts than before: look for a new client by phalanx keys usage. Where that "
    "is wanted, remove the model from watch.json.",
    "drift_completions": "The model answers at another length than before: compare its digest with the one in the "
    "passport of the model; after a wanted change, remove the model from watch.json.",
    "drift_refusals": "Filters refuse another share than before: look for the filter in phalanx_filter_refusals_total "
    "and for a new client by phalanx keys usage.",
    "reference": "The model is not what it was: compare its digest in /v1/models with the one of its export; if they "
    "differ, phalanx incident quarantine --model NAME, then rollback.",
}
"""What to do, by rule."""


@dataclass(frozen=True)
class Alert:
    """A rule that does not hold.

    Attributes:
        subject: Id of the key or of the model; ``server`` for all.
        value: What was measured, beside its `limit`.
        action: What the operator does now.
    """

    rule: str
    subject: str
    value: float
    limit: float
    action: str

    def describe(self) -> str:
        """Return it as one line."""
        return f"alert {self.rule} of {self.subject}: {self.value:.4g}, limit {self.limit:.4g}. {self.action}"


class AlertWatch:
    """The rules of one server and their memory; for one event loop."""

    def __init__(self, rules: AlertRules, baselines: Baselines) -> None:
        self._rules = rules
        self._first = baselines
        self._errors = WindowCounts(rules.errors.window_s)
        self._strangers = WindowCounts(rules.guessing.window_s)
        self._refusals: dict[str, WindowCounts] = {}
        self._walks = PromptWalks(rules.extraction)
        self._drifts: dict[str, TrafficDrift] = {}
        self._perplexities: dict[str, tuple[float, str]] = {}
        self._active: dict[tuple[str, str], Alert] = {}

    def add_request(self, now: float, outcome: RequestOutcome, notes: RequestNotes) -> None:
        """Take a request that is over."""
        if outcome.status == 401:
            self._strangers.add_count(now, "refused")
            return
        if outcome.route not in OPERATIONS:
            return
        if outcome.status == 200 or outcome.status >= 500:
            # a request that is refused costs its client nothing: many would hide the faults of others
            self._errors.add_count(now, "requests")
            self._errors.add_count(now, "faults", int(outcome.status >= 500))
        key = None if notes.caller is None else notes.caller.key_id
        is_refused = bool(outcome.refusing_filters)
        if key is not None:
            if is_refused:
                window = self._refusals.setdefault(key, WindowCounts(self._rules.abuse.window_s))
                window.add_count(now, "refused")
            self._walks.add_request(
                now,
                key,
                notes.sketches,
                has_logprobs=notes.has_logprobs,
                output_tokens=outcome.completion_tokens or 0,
            )
        if outcome.status == 200 or is_refused:
            # a prompt that is refused names no model in the log
            self._drift_of(_ALL).add_request(0, 0, is_refused=is_refused)
        if outcome.status == 200 and outcome.model != OTHER:
            self._drift_of(outcome.model).add_request(
                outcome.prompt_tokens or 0, outcome.completion_tokens or 0, is_refused=False
            )

    def set_perplexity(self, model: str, perplexity: float, texts_digest: str) -> None:
        """Take a measurement on the reference texts."""
        self._perplexities[model] = perplexity, texts_digest
        first = self._first.models.get(model, ModelBaseline())
        if first.perplexity is None or first.texts_digest != texts_digest:
            changed = first.model_copy(update={"perplexity": perplexity, "texts_digest": texts_digest})
            self._first = Baselines(models={**self._first.models, model: changed})

    def read_perplexities(self) -> dict[tuple[str, ...], float]:
        """Return the last perplexity of each model."""
        return {(model,): perplexity for model, (perplexity, _) in self._perplexities.items()}

    def read_baselines(self) -> Baselines:
        """Return the baselines of all models, for the next process."""
        models = dict(self._first.models)
        for model, drift in self._drifts.items():
            if drift.baseline is not None:
                models[model] = models.get(model, ModelBaseline()).model_copy(update={"traffic": drift.baseline})
        return Baselines(models=models)

    def check_rules(self, now: float) -> tuple[list[Alert], list[Alert]]:
        """Return the alerts that begin now, and the alerts that are over."""
        active = {(alert.rule, alert.subject): alert for alert in self._find_alerts(now)}
        begun = [alert for name, alert in active.items() if name not in self._active]
        over = [alert for name, alert in self._active.items() if name not in active]
        self._active = active
        return begun, over

    def count_active(self) -> Mapping[tuple[str, ...], float]:
        """Return the number of alerts that are not over, by rule; 0 for every other rule."""
        counts: dict[tuple[str, ...], float] = {(rule,): 0.0 for rule in ACTIONS}
        for rule, _ in self._active:
            counts[rule,] += 1
        return counts

    def _drift_of(self, model: str) -> TrafficDrift:
        if model not in self._drifts:
            first = self._first.models.get(model, ModelBaseline())
            self._drifts[model] = TrafficDrift(self._rules.drift.num_requests, first.traffic)
        return self._drifts[model]

    def _find_alerts(self, now: float) -> Iterator[Alert]:
        rules = self._rules
        counts = self._errors.read_counts(now)
        share = counts["faults"] / max(1, counts["requests"])
        if rules.errors.on and counts["requests"] >= rules.errors.min_requests and share > rules.errors.max_share:
            yield _alert("errors", "server", share, rules.errors.max_share)
        refused = self._strangers.read_counts(now)["refused"]
        if rules.guessing.on and refused > rules.guessing.max_refused:
            yield _alert("guessing", "server", refused, rules.guessing.max_refused)
        yield from self._find_keys(now)
        yield from self._find_drifts()

    def _find_keys(self, now: float) -> Iterator[Alert]:
        abuse, extraction = self._rules.abuse, self._rules.extraction
        for key, window in list(self._refusals.items()):
            refused = window.read_counts(now)["refused"]
            if not refused:
                del self._refusals[key]
            elif abuse.on and refused > abuse.max_refused:
                yield _alert("abuse", key, refused, abuse.max_refused)
        if extraction.on:
            for key, walk in self._walks.read_walks(now).items():
                if walk.is_extraction(extraction):
                    is_scored = walk.num_scored >= extraction.min_scored_prompts
                    limit = extraction.min_scored_prompts if is_scored else extraction.min_prompts
                    yield _alert("extraction", key, walk.num_scored if is_scored else walk.num_new, limit)

    def _find_drifts(self) -> Iterator[Alert]:
        drift, reference = self._rules.drift, self._rules.reference
        for model, traffic in self._drifts.items() if drift.on else ():
            prompts, completions, refusals = traffic.measure()
            if prompts > drift.max_shift:
                yield _alert("drift_prompts", model, prompts, drift.max_shift)
            if completions > drift.max_shift:
                yield _alert("drift_completions", model, completions, drift.max_shift)
            if refusals > drift.max_deviations:
                yield _alert("drift_refusals", "server", refusals, drift.max_deviations)
        for model, (perplexity, _) in self._perplexities.items():
            first = self._first.models[model].perplexity
            change = 0.0 if first is None else abs(perplexity / first - 1)
            if not change <= reference.max_change:
                yield _alert("reference", model, change, reference.max_change)


def _alert(rule: str, subject: str, value: float, limit: float) -> Alert:
    return Alert(rule, subject, float(value), float(limit), ACTIONS[rule])


class Webhook:
    """Sends alerts to the address in the operator's file; redirects are not followed."""

    def __init__(self, url: str, secret_file: Path | None) -> None:
        self._url = url
        headers = {"user-agent": "phalanx-alerts"}
        if secret_file is not None:
            secret = read_private(secret_file, "it is the webhook's secret").decode("latin-1").strip()
            headers["authorization"] = f"Bearer {secret}"
        self._client = httpx2.AsyncClient(headers=headers, timeout=_WEBHOOK_TIMEOUT_S, trust_env=False)

    async def send_alert(self, alert: Alert, *, is_over: bool) -> None:
        """Send one alert; a receiver that does not take it is named in the log."""
        await self.post_object({**asdict(alert), "state": "over" if is_over else "begun", "text": alert.describe()})

    async def post_object(self, body: Mapping[str, object]) -> None:
        """Send JSON data; a receiver that does not take it is named in the log."""
        try:
            # the head alone: a receiver's text could be long, or never end
            async with (
                asyncio.timeout(_WEBHOOK_TIMEOUT_S),
                self._client.stream("POST", self._url, json=body) as answer,
            ):
                status = answer.status_code
        except (httpx2.HTTPError, TimeoutError) as exc:
            _log.error("the webhook did not take an alert: %s", type(exc).__name__)
            return
        if status >= 300:
            _log.error("the webhook did not take an alert: status %d", status)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()
