"""The file of whoever watches a training run: traces, rules of alerts, and who is told of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, load_config
from phalanx.serve.observe.config import Share, TraceConfig, WindowS, check_address

_Seconds = Annotated[float, Field(gt=0, le=86_400 * 7, allow_inf_nan=False)]
_Address = Annotated[str, Field(max_length=200, pattern=r"^[^@\s,<>\"]+@[^@\s,<>\"]+\z")]


class SpikeRule(StrictModel):
    """Loss or gradient norm is far above that of the last steps.

    Attributes:
        window: Steps before the present one; no rule holds below a fifth of them.
        max_deviations: Distance above their median, in robust standard deviations (1.4826 times the median distance).
    """

    on: bool = True
    window: Annotated[int, Field(ge=10, le=10_000)] = 100
    max_deviations: Annotated[float, Field(gt=1, le=1000)] = 12.0


class StallRule(StrictModel):
    """No step ends: for `max_s`, or for so many times the median of the last 100 steps, whichever is longer."""

    on: bool = True
    max_s: _Seconds = 600.0
    max_steps: Annotated[float, Field(ge=2, le=10_000)] = 10.0


class SlowPartyRule(StrictModel):
    """The owner has not heard of a party that serves a stage for so long, while it has heard of another one."""

    on: bool = True
    max_silence_s: _Seconds = 120.0


class DiskRule(StrictModel):
    """The disk of the run directory has less free space than this."""

    on: bool = True
    min_free_bytes: Annotated[int, Field(ge=0)] = 2 << 30


class MemoryRule(StrictModel):
    """More than this share of the machine's memory is taken."""

    on: bool = True
    max_share: Share = 0.95


class CanaryRule(StrictModel):
    """A leak curve named ``exposure`` is above this, in bits; only where the run measures one."""

    on: bool = True
    max_exposure: Annotated[float, Field(gt=0, le=1000)] = 8.0


class SpendingRule(StrictModel):
    """So large a share of the run's privacy budget is spent."""

    on: bool = True
    max_share: Share = 0.9


class EmailConfig(StrictModel):
    """A mail server that takes alerts.

    Attributes:
        starttls: Whether the connection is encrypted before anything is sent; plain SMTP is for this machine alone.
        password_file: File, 0600, with the password of `user`.
    """

    host: Annotated[str, Field(min_length=1, max_length=253)]
    port: Annotated[int, Field(ge=1, le=65535)] = 587
    sender: _Address
    recipients: Annotated[tuple[_Address, ...], Field(min_length=1, max_length=20)]
    starttls: bool = True
    user: Annotated[str, Field(max_length=200)] = ""
    password_file: Path | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.starttls and self.host not in ("localhost", "127.0.0.1", "::1"):
            raise ValueError("plain SMTP to another machine can be read and altered on the way; set starttls = true")
        if bool(self.user) != (self.password_file is not None):
            raise ValueError("user and password_file go together; set both or none")
        return self


class RunAlertRules(StrictModel):
    """When somebody is called, and how.

    Attributes:
        check_every_s: Seconds between two looks at all rules.
        hold_s: Seconds for which an alert of an event (a verdict, NaN) stays active after the last such event.
        webhook: Address that gets each alert as JSON; empty for none.
        webhook_secret_file: File, 0600, with the secret that is sent as bearer token.
        command: Program and arguments that are started for each alert, without a shell; the alert is JSON on its input.
        timeout_s: Time that one receiver may take for one alert.
    """

    check_every_s: Annotated[float, Field(gt=0, le=3600)] = 2.0
    hold_s: WindowS = 600
    webhook: Annotated[str, Field(max_length=300)] = ""
    webhook_secret_file: Path | None = None
    command: Annotated[tuple[str, ...], Field(max_length=32)] = ()
    email: EmailConfig | None = None
    timeout_s: Annotated[float, Field(gt=0, le=300)] = 10.0
    spike: SpikeRule = SpikeRule()
    stall: StallRule = StallRule()
    slow_party: SlowPartyRule = SlowPartyRule()
    disk: DiskRule = DiskRule()
    memory: MemoryRule = MemoryRule()
    canary: CanaryRule = CanaryRule()
    budget: SpendingRule = SpendingRule()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.webhook:
            check_address(self.webhook)
        return self


class RunWatchConfig(StrictModel):
    """The whole file; everything has a default."""

    traces: TraceConfig = TraceConfig(service="phalanx-train")
    alerts: RunAlertRules = RunAlertRules()

    def below(self, folder: Path) -> Self:
        """Return the same with relative paths of a folder."""
        alerts, email = self.alerts, self.alerts.email
        secret = alerts.webhook_secret_file
        update = {
            "webhook_secret_file": None if secret is None else folder / secret,
            "email": email
            if email is None or email.password_file is None
            else email.model_copy(update={"password_file": folder / email.password_file}),
        }
        return self.model_copy(update={"alerts": alerts.model_copy(update=update)})


def load_run_watch(path: Path, overrides: Iterable[str] = ()) -> RunWatchConfig:
    """Read the file; relative paths in it are of its folder.

    Raises:
        ConfigError: Names the file, the key and the fault.
    """
    return load_config(path, RunWatchConfig, overrides).below(path.parent)
