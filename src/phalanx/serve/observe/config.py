"""The file of whoever watches a server: traces, and the rules of alerts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from phalanx.config import StrictModel, load_config
from phalanx.serve.access.listener import is_loopback

Share = Annotated[float, Field(gt=0, le=1)]
WindowS = Annotated[int, Field(ge=10, le=86_400)]
Number = Annotated[int, Field(ge=1, le=1_000_000_000)]
KeyId = Annotated[str, Field(pattern=r"^[a-z2-7]{12}\z")]


def check_address(url: str) -> str:
    """Return the address of a collector or webhook.

    Raises:
        ValueError: It is not HTTP, or plain HTTP to another machine.
    """
    parts = urlsplit(url)
    # both raise ValueError for what no connection can be opened to
    _ = parts.port, (parts.hostname or "").encode("idna")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or "\\" in url:
        raise ValueError("expected such as https://collector.example.org/v1/traces, without user name or backslash")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError("plain HTTP to another machine can be read and altered on the way; use https")
    return url


class TraceConfig(StrictModel):
    """Spans of requests, sent by OTLP over HTTP; they hold names, sizes and times, and no text.

    Attributes:
        endpoint: Address of the collector, such as ``http://127.0.0.1:4318/v1/traces``; empty sends nothing.
        max_waiting: Spans that wait to be sent; further ones are dropped.
    """

    endpoint: Annotated[str, Field(max_length=300)] = ""
    share: Share = 1.0
    max_waiting: Annotated[int, Field(ge=1, le=100_000)] = 2048
    service: Annotated[str, Field(min_length=1, max_length=100)] = "phalanx"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.endpoint:
            check_address(self.endpoint)
        return self


class ErrorRule(StrictModel):
    """Too large a share of requests ends with a fault of the server."""

    on: bool = True
    window_s: WindowS = 300
    min_requests: Number = 20
    max_share: Share = 0.05


class GuessRule(StrictModel):
    """Too many requests without a valid key."""

    on: bool = True
    window_s: WindowS = 300
    max_refused: Number = 100


class AbuseRule(StrictModel):
    """Filters refuse too many texts of one key, prompts and answers together."""

    on: bool = True
    window_s: WindowS = 600
    max_refused: Number = 20


class ExtractionRule(StrictModel):
    """One key walks the model: many prompts with nothing in common, for scores or for much text.

    Attributes:
        min_scored_prompts: New prompts in the window that ask for log-probabilities; or
        min_prompts: new prompts in the window, with
        min_output_tokens: tokens that were written for the key in it.
        max_overlap: Share of a prompt's runs of four tokens that earlier prompts of the key may have in a new prompt;
            runs that most of its prompts have, such as the runs of an instruction, do not count.
        exempt_keys: Keys of evaluations and batch jobs, which do the same for a good reason.
    """

    on: bool = True
    window_s: WindowS = 3600
    min_scored_prompts: Number = 300
    min_prompts: Number = 1000
    min_output_tokens: Number = 200_000
    max_overlap: Share = 0.3
    exempt_keys: Annotated[tuple[KeyId, ...], Field(max_length=1000)] = ()


class DriftRule(StrictModel):
    """Lengths or refusals of recent requests differ from the first requests.

    Attributes:
        num_requests: First requests that are the baseline, and recent ones that are compared with it.
        max_shift: Population stability index of lengths in powers of two; .1 is a change, .25 a large one.
        max_deviations: Standard deviations between both shares of refusals.
    """

    on: bool = True
    num_requests: Annotated[int, Field(ge=100, le=10_000)] = 500
    max_shift: Annotated[float, Field(gt=0, le=10)] = 0.25
    max_deviations: Annotated[float, Field(ge=2, le=100)] = 5.0


class ReferenceRule(StrictModel):
    """The perplexity of a model on texts of the operator has changed.

    Attributes:
        texts: File with one text a line; none is measured without it.
    """

    texts: Path | None = None
    every_s: Annotated[int, Field(ge=10, le=604_800)] = 3600
    max_change: Share = 0.02


class AlertRules(StrictModel):
    """When the operator is called.

    Attributes:
        check_every_s: Seconds between two looks at all rules.
        webhook: Address that gets each alert as JSON; empty for the log alone.
        webhook_secret_file: File, 0600, with the secret that is sent as bearer token.
    """

    check_every_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    webhook: Annotated[str, Field(max_length=300)] = ""
    webhook_secret_file: Path | None = None
    errors: ErrorRule = ErrorRule()
    guessing: GuessRule = GuessRule()
    abuse: AbuseRule = AbuseRule()
    extraction: ExtractionRule = ExtractionRule()
    drift: DriftRule = DriftRule()
    reference: ReferenceRule = ReferenceRule()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.webhook:
            check_address(self.webhook)
        return self


class WatchConfig(StrictModel):
    """The whole file; everything has a default."""

    traces: TraceConfig = TraceConfig()
    alerts: AlertRules = AlertRules()

    def below(self, folder: Path) -> Self:
        """Return the same with relative paths of a folder."""
        alerts, reference = self.alerts, self.alerts.reference
        paths = {"webhook_secret_file": alerts.webhook_secret_file}
        update = {name: None if path is None else folder / path for name, path in paths.items()}
        texts = None if reference.texts is None else folder / reference.texts
        changed = alerts.model_copy(update={**update, "reference": reference.model_copy(update={"texts": texts})})
        return self.model_copy(update={"alerts": changed})


def load_watch_config(path: Path, overrides: Iterable[str] = ()) -> WatchConfig:
    """Read the file; relative paths in it are of its folder."""
    return load_config(path, WatchConfig, overrides).below(path.parent)
