"""Receivers of alerts: the log, a webhook, a command, e-mail. One that hangs or is gone delays no other, and no run."""

import asyncio
import contextlib
import json
import logging
import smtplib
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from email.errors import MessageError
from email.message import EmailMessage

from phalanx.config import printable_text
from phalanx.security.crypto import read_private
from phalanx.serve.observe.alerts import Alert, Webhook
from phalanx.watch.config import EmailConfig, RunAlertRules

_log = logging.getLogger("phalanx.watch")
_MAX_WAITING = 100

Send = Callable[[Alert, str, bool], Awaitable[None]]
"""Takes an alert, the run's name, and whether it is over."""


class AlertReceivers:
    """All receivers of one watcher, each with a queue of its own.

    Raises:
        CertificateError: A secret's file cannot be read, or others can read it.

    Attributes:
        num_dropped: Alerts that found a full queue, by receiver.

    Guarantees:
        `tell_receivers` never waits. A receiver has `timeout_s` for one alert; if it does not take it, the log names
        the receiver.
    """

    def __init__(self, rules: RunAlertRules) -> None:
        self._timeout_s = rules.timeout_s
        self._webhook = Webhook(rules.webhook, rules.webhook_secret_file) if rules.webhook else None
        sends: dict[str, Send] = {}
        if self._webhook is not None:
            sends["webhook"] = self._post_alert
        if rules.command:
            sends["command"] = _CommandReceiver(rules.command, rules.timeout_s).send_alert
        if rules.email is not None:
            sends["e-mail"] = _EmailReceiver(rules.email, rules.timeout_s).send_alert
        self._sends = sends
        self._queues: dict[str, asyncio.Queue[tuple[Alert, str, bool]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.num_dropped = dict.fromkeys(sends, 0)

    async def __aenter__(self) -> "AlertReceivers":
        for name, send in self._sends.items():
            queue = self._queues[name] = asyncio.Queue(_MAX_WAITING)
            self._tasks.append(asyncio.create_task(self._feed_receiver(name, send, queue)))
        return self

    async def __aexit__(self, *_: object) -> None:
        # a receiver that hangs is named by its own time limit first
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s + 2):
                await asyncio.gather(*(queue.join() for queue in self._queues.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._webhook is not None:
            await self._webhook.close()

    def tell_receivers(self, alert: Alert, run: str, *, is_over: bool) -> None:
        """Write one alert to the log, and queue it for every receiver."""
        text = printable_text(f"{run}: {alert.describe()}", 2000)
        if is_over:
            _log.warning("%s", f"{printable_text(run)}: alert {alert.rule} of {printable_text(alert.subject)} is over")
        else:
            _log.error("%s", text)
        for name, queue in self._queues.items():
            try:
                queue.put_nowait((alert, run, is_over))
            except asyncio.QueueFull:
                self.num_dropped[name] += 1

    async def _feed_receiver(self, name: str, send: Send, queue: asyncio.Queue[tuple[Alert, str, bool]]) -> None:
        while True:
            alert, run, is_over = await queue.get()
            try:
                await asyncio.wait_for(send(alert, run, is_over), self._timeout_s + 1)
            except (TimeoutError, OSError, ValueError, MessageError, smtplib.SMTPException) as exc:
                _log.error("%s did not take an alert: %s", name, type(exc).__name__)
            finally:
                queue.task_done()

    async def _post_alert(self, alert: Alert, run: str, is_over: bool) -> None:
        if self._webhook is not None:
            await self._webhook.post_object(alert_object(alert, run, is_over=is_over))


def alert_object(alert: Alert, run: str, *, is_over: bool) -> dict[str, object]:
    """Return an alert as JSON data; a value that is no number is null."""
    facts = asdict(alert)
    is_number = alert.value - alert.value == 0
    number = alert.value if is_number else None
    return {**facts, "value": number, "run": run, "state": "over" if is_over else "begun", "text": alert.describe()}


class _CommandReceiver:
    """Starts a program for each alert, which comes on its standard input, never on its command line."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self._command, self._timeout_s = command, timeout_s

    async def send_alert(self, alert: Alert, run: str, is_over: bool) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            text = json.dumps(alert_object(alert, run, is_over=is_over)).encode()
            await asyncio.wait_for(process.communicate(text), self._timeout_s)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            _log.error("the command of alerts ended with exit code %d", process.returncode)


class _EmailReceiver:
    """Sends each alert as a mail, over one connection of its own."""

    def __init__(self, config: EmailConfig, timeout_s: float) -> None:
        self._config, self._timeout_s = config, timeout_s
        file = config.password_file
        self._password = "" if file is None else read_private(file, "it is the mail server's password").decode().strip()

    async def send_alert(self, alert: Alert, run: str, is_over: bool) -> None:
        await asyncio.to_thread(self._send_mail, alert, run, is_over)

    def _send_mail(self, alert: Alert, run: str, is_over: bool) -> None:
        config, message = self._config, EmailMessage()
        state = "over" if is_over else "begun"
        # names of parties and runs are texts of others: no line of theirs may become a header
        message["Subject"] = _plain_subject(f"[phalanx] {run}: {alert.rule} of {alert.subject} ({state})")
        message["From"], message["To"] = config.sender, ", ".join(config.recipients)
        message.set_content(f"{printable_text(alert.describe(), 2000)}\n")
        with smtplib.SMTP(config.host, config.port, timeout=self._timeout_s) as server:
            if config.starttls:
                server.starttls(context=ssl.create_default_context())
            if config.user:
                server.login(config.user, self._password)
            server.send_message(message)


def _plain_subject(text: str) -> str:
    """Return a text as a header that means these characters.

    `EmailMessage` decodes what looks like an encoded word of RFC 2047, and a line end in one begins another header.
    """
    return printable_text(text, 150).replace("=?", "= ?")
