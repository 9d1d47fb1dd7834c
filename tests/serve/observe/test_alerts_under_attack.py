"""Alerts that somebody would silence: by other requests, a full disk, a full queue, a receiver that hangs."""

import asyncio
import json
import math
import socket
import threading
from types import SimpleNamespace

import pytest
from collector import Collector
from test_alerts import Traffic

from phalanx.errors import ConfigError, DiskError
from phalanx.serve.engine import BadRequestError, EngineBusyError, PromptRead, TokenScore
from phalanx.serve.observe import ServerWatch, WatchConfig, WatchedServer, load_watch_config, measure_models
from phalanx.serve.observe import alerts as alerts_module


@pytest.mark.parametrize("status", [400, 403, 413, 415, 429, 499])
def test_requests_that_are_refused_do_not_hide_faults(status):
    """Attacker: a client with a key that thins out faults by requests which cost it nothing."""
    traffic = Traffic(errors={"min_requests": 20, "max_share": 0.05})
    for _ in range(20):
        traffic.ask(status=500)
    for _ in range(2000):
        traffic.ask(status=status)

    assert traffic.begun() == [("errors", "server")]


def watch_server(tmp_path, record_event, **alerts) -> ServerWatch:
    config = WatchConfig.model_validate({"alerts": alerts}, strict=False)
    server = WatchedServer(tmp_path, dict, dict)
    return ServerWatch(config, server, SimpleNamespace(record_event=record_event))


def have_strangers(watch: ServerWatch) -> None:
    """Have a rule fail at the next look."""

    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ignore(message):
        pass

    async def ask():
        for _ in range(3):
            await watch.wrap_app(refuse)({"type": "http", "path": "/"}, None, ignore)

    asyncio.run(ask())


GUESSES = {"guessing": {"max_refused": 2}}


def test_a_full_disk_keeps_no_alert_from_the_webhook(tmp_path):
    def refuse(kind, facts):
        raise DiskError("no space left")

    with Collector() as hook:
        watch = watch_server(tmp_path, refuse, webhook=f"{hook.url}/alert", **GUESSES)
        have_strangers(watch)
        with pytest.raises(DiskError):
            asyncio.run(watch.check_rules())
        alert = json.loads(hook.bodies.get(timeout=120)[2])

    assert (alert["rule"], alert["state"]) == ("guessing", "begun")


def answer_for_ever(server: socket.socket, stop: threading.Event) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not stop.wait(0.01):
            try:
                connection.sendall(b"1\r\nx\r\n")
            except OSError:
                return


def test_a_receiver_whose_answer_does_not_end_holds_up_no_alert(tmp_path, monkeypatch):
    monkeypatch.setattr(alerts_module, "_WEBHOOK_TIMEOUT_S", 0.3)
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_for_ever, args=(server, stop))
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        watch = watch_server(tmp_path, lambda kind, facts: None, webhook=url, **GUESSES)
        have_strangers(watch)

        async def look():
            async with asyncio.timeout(60):
                await watch.check_rules()

        try:
            asyncio.run(look())
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize(
    "url", ["https://hooks.example.org:99999/", "https://hooks.example.org:x/", "https://a..example.org/"]
)
@pytest.mark.parametrize("key", ["alerts.webhook", "traces.endpoint"])
def test_an_address_that_cannot_be_called_is_refused_at_the_start(tmp_path, key, url):
    folder, name = key.split(".")
    file = tmp_path / "watch.toml"
    file.write_text(f"[{folder}]\n{name} = '{url}'\n")

    with pytest.raises(ConfigError, match=folder):
        load_watch_config(file)


class Pool:
    """Engines of two models, of which the first one fails as a test wants."""

    cards = (SimpleNamespace(id="first", window=8), SimpleNamespace(id="second", window=8))

    def __init__(self, fault=None, logprob=-1.0):
        self.fault, self.logprob = fault, logprob

    async def encode_prompt(self, request):
        return (1, 2, 3)

    async def open_events(self, request, prompt):
        if request.model == "first" and self.fault is not None:
            raise self.fault
        logprob = self.logprob if request.model == "first" else -1.0
        return self._write(logprob)

    async def _write(self, logprob):
        score = TokenScore(1, logprob)
        yield PromptRead(num_tokens=3, reused_tokens=0, scores=(None, score, score))


@pytest.mark.parametrize("fault", [EngineBusyError("the queue is full"), BadRequestError("too long", "prompt")])
def test_an_engine_without_a_place_ends_no_measurement(fault):
    """Attacker: a client that fills the queue while perplexities are measured, and so ends measuring for good."""
    assert asyncio.run(measure_models(Pool(fault), ["a text"])) == {"second": pytest.approx(math.e)}


def test_a_model_that_is_beyond_all_measure_is_measured():
    perplexities = asyncio.run(measure_models(Pool(logprob=-5000.0), ["a text"]))

    assert perplexities["first"] > 1e300
    assert perplexities["second"] == pytest.approx(math.e)
