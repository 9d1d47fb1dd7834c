"""Load on real servers over loopback: the gateway's cost, many open streams, and counts that outlive ``kill -9``."""

import asyncio
import http.client
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tomli_w

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import LineProcess
from phalanx.lab.bench.measure.process_clock import cpu_seconds, peak_memory_bytes
from phalanx.security.crypto import write_private
from phalanx.serve.access import BUDGETS_FILE, KeyLimits, KeyStore, KeyTerms, read_usage_by_day

_MIB = 1 << 20
_BILLION = 10**9
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_STREAM_TOKENS = 32
_CROWD_TOKENS = 4
_KILL_STREAMS = 8


@dataclass(frozen=True)
class ServedAddress:
    """A server that takes requests, with a key for it."""

    process: LineProcess
    url: str
    secret: str
    model: str
    access: Path


@dataclass
class StreamAnswer:
    """One streamed answer.

    Attributes:
        num_pieces: Events with text that arrived; none holds more than one token's text.
        tokens: Completion tokens by its usage; 0 where that did not arrive.
    """

    status: int = 0
    num_pieces: int = 0
    is_whole: bool = False
    tokens: int = 0


def make_access(directory: Path) -> str:
    """Make an access directory, unless it is there, and one more key without bounds that matter; return its secret."""
    is_new = not directory.exists()
    store = (KeyStore.create if is_new else KeyStore.open)(directory)
    limits = KeyLimits(
        requests_per_minute=_BILLION,
        tokens_per_minute=_BILLION,
        requests_per_month=_BILLION,
        tokens_per_month=_BILLION,
        concurrency=10_000,
    )
    terms = KeyTerms(owner="bench", expires=int(time.time()) + 86_400, limits=limits)
    return store.create_key(terms)[1]


@contextmanager
def open_server(directory: Path, access: Path, scratch: Path, *options: str) -> Iterator[ServedAddress]:
    """Run ``phalanx serve`` on a model."""
    secret = make_access(access)
    place = ("serve", str(directory), "--access", str(access), "--port", "0", "--threads", "1", "--name", "bench")
    command = ("phalanx", *place, "--json", *options)
    with LineProcess("phalanx serve", command, _ENVIRONMENT, scratch / "serve.log") as process:
        try:
            yield ServedAddress(process, json.loads(process.read_text())["url"], secret, "bench", access)
        finally:
            _terminate(process)


@contextmanager
def open_gateway(engine_url: str, engine_secret: str, model: str, scratch: Path) -> Iterator[ServedAddress]:
    """Run ``phalanx gateway`` before one engine; it has the default filters."""
    folder = scratch / f"gateway-{model}"
    folder.mkdir(exist_ok=True)
    secret = make_access(folder / "access")
    key = folder / "engine.key"
    if not key.exists():
        write_private(key, engine_secret.encode() + b"\n")
    backend = {
        "name": "engine",
        "url": engine_url,
        "models": {model: model},
        "local": True,
        "secret_file": key.name,
        "max_concurrency": 10_000,
    }
    config = {"access": "access", "listen": {"port": 0}, "backends": [backend]}
    (folder / "gateway.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    command = ("phalanx", "gateway", str(folder / "gateway.toml"))
    with LineProcess("phalanx gateway", command, _ENVIRONMENT, scratch / "gateway.log") as process:
        try:
            yield ServedAddress(process, process.read_text().split()[-1], secret, model, folder / "access")
        finally:
            _terminate(process)


@contextmanager
def open_stub(hold: int, scratch: Path) -> Iterator[ServedAddress]:
    """Run an engine that writes nothing."""
    command = ("phalanx.lab.bench.serving.stub_engine", str(hold))
    with LineProcess("the stub", command, _ENVIRONMENT, scratch / "stub.log") as process:
        try:
            yield ServedAddress(process, process.read_text().strip(), "any", "stub", scratch)
        finally:
            _terminate(process)


def _terminate(process: LineProcess) -> None:
    """Tell a server to end, so that closing it need not wait."""
    try:
        os.kill(process.process_id, signal.SIGTERM)
    except ProcessLookupError:
        return


def _body(server: ServedAddress, tokens: int, *, stream: bool, text: str = "Tell me about the sea.") -> bytes:
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
    }
    return json.dumps(body | ({"stream_options": {"include_usage": True}} if stream else {})).encode()


def _headers(server: ServedAddress) -> dict[str, str]:
    return {"authorization": f"Bearer {server.secret}", "content-type": "application/json"}


async def read_stream(server: ServedAddress, body: bytes, on_piece: Callable[[], None] = lambda: None) -> StreamAnswer:
    """Send one request and read its events to the end, or to where the connection breaks."""
    answer = StreamAnswer()
    parts = urlsplit(server.url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = "".join(f"{name}: {value}\r\n" for name, value in _headers(server).items())
        request = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n{head}"
        writer.write(f"{request}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer.status = int((await reader.readline()).split()[1])
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                answer.is_whole = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                answer.tokens = (chunk.get("usage") or {}).get("completion_tokens", answer.tokens)
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    answer.num_pieces += 1
                    on_piece()
        writer.close()
    except (OSError, IndexError):
        # the server was killed
        return answer
    return answer


async def _read_many(server: ServedAddress, count: int, tokens: int) -> list[StreamAnswer]:
    bodies = [
        _body(server, tokens, stream=True, text=f"Question {number}: what is the sea?") for number in range(count)
    ]
    return await asyncio.gather(*(read_stream(server, body) for body in bodies))


def measure_added_latency(requests: int, scratch: Path) -> dict[str, Any]:
    """Send pairs of short requests on open connections, one with and one without the gateway, and compare them."""
    with (
        open_stub(0, scratch) as stub,
        open_gateway(stub.url, "any", stub.model, scratch) as gateway,
        ExitStack() as stack,
    ):
        connections = {}
        for name, server in (("direct", stub), ("gateway", gateway)):
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
            connections[name] = stack.enter_context(closing(connection)), server
        seconds: dict[str, list[float]] = {"direct": [], "gateway": []}
        for connection, server in connections.values():
            for _ in range(20):
                _ask_once(connection, server)
        used = cpu_seconds([gateway.process.process_id])
        for number in range(requests):
            for name in sorted(connections, reverse=bool(number % 2)):
                seconds[name].append(_ask_once(*connections[name]))
        used = cpu_seconds([gateway.process.process_id]) - used
    added = [with_it - without for with_it, without in zip(seconds["gateway"], seconds["direct"], strict=True)]
    quantiles = {name: statistics.quantiles(values, n=100) for name, values in {**seconds, "added": added}.items()}
    return {
        "requests": requests,
        **{f"{name}_p{p}_ms": 1e3 * values[p - 1] for name, values in quantiles.items() for p in (50, 99)},
        "gateway_cpu_ms": 1e3 * used / requests,
    }


def _ask_once(connection: http.client.HTTPConnection, server: ServedAddress) -> float:
    begun = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", _body(server, 16, stream=False), _headers(server))
    answer = connection.getresponse()
    content = answer.read()
    seconds = time.perf_counter() - begun
    if answer.status != 200:
        raise TrainingError(f"bench serve: {server.url} answered {answer.status}: {content[:200]!r}")
    return seconds


def measure_gateway_share(directory: Path, scratch: Path, turns: int, streams: int) -> dict[str, Any]:
    """Compare tokens a second of one engine with and without the gateway before it, in turns."""
    with (
        open_server(directory, scratch / "share", scratch) as engine,
        open_gateway(engine.url, engine.secret, engine.model, scratch) as gateway,
    ):
        rates: dict[str, list[float]] = {"direct": [], "gateway": []}
        asyncio.run(_read_many(engine, 1, 4))
        asyncio.run(_read_many(gateway, 1, 4))
        pids = [gateway.process.process_id], [engine.process.process_id]
        before = [cpu_seconds(group) for group in pids]
        for turn in range(2 * turns):
            name, server = (("direct", engine), ("gateway", gateway))[(turn + turn // 2) % 2]
            begun = time.perf_counter()
            answers = asyncio.run(_read_many(server, streams, _STREAM_TOKENS))
            rates[name].append(sum(answer.tokens for answer in answers) / (time.perf_counter() - begun))
        used_by_gateway, used_by_engine = (cpu_seconds(group) - old for group, old in zip(pids, before, strict=True))
    medians = {f"{name}_tokens_per_s": statistics.median(values) for name, values in rates.items()}
    return {
        "streams": streams,
        **medians,
        "lost_share": 1 - medians["gateway_tokens_per_s"] / medians["direct_tokens_per_s"],
        # the engine worked in all turns, the gateway in every second one
        "cpu_share": 2 * used_by_gateway / used_by_engine,
    }


def measure_crowd(directory: Path, scratch: Path, streams: int) -> list[dict[str, Any]]:
    """Open many streams at the same time: at the engine, and at a gateway before an engine that waits for them all."""
    rows = []
    options = ("--max-rows", "1024", "--max-waiting", "2048", "--max-cache-tokens", str(1 << 18))
    with open_server(directory, scratch / "crowd", scratch, *options) as engine:
        rows.append(_crowd_row("serve", engine, streams))
    with (
        open_stub(streams, scratch) as stub,
        open_gateway(stub.url, "any", stub.model, scratch) as gateway,
    ):
        rows.append(_crowd_row("gateway", gateway, streams))
    return rows


def _crowd_row(name: str, server: ServedAddress, streams: int) -> dict[str, Any]:
    before = peak_memory_bytes([server.process.process_id])
    begun = time.perf_counter()
    answers = asyncio.run(_read_many(server, streams, _CROWD_TOKENS if name == "serve" else 16))
    return {
        "server": name,
        "streams": streams,
        "whole": sum(answer.is_whole and answer.status == 200 for answer in answers),
        "tokens": sum(answer.tokens for answer in answers),
        "wall_s": time.perf_counter() - begun,
        "peak_mib": peak_memory_bytes([server.process.process_id]) / _MIB,
        "grown_mib": (peak_memory_bytes([server.process.process_id]) - before) / _MIB,
    }


def measure_kills(directory: Path, scratch: Path, kills: int) -> dict[str, Any]:
    """Kill a server under load, again and again, and compare what clients got with what its journal counts."""
    access = scratch / "kills"
    requests = pieces = whole = 0
    for number in range(kills):
        with open_server(directory, access, scratch) as server:
            answers = asyncio.run(_kill_under_load(server, (number + 1) * _KILL_STREAMS))
        requests += sum(answer.num_pieces > 0 for answer in answers)
        pieces += sum(answer.num_pieces for answer in answers)
        whole += sum(answer.is_whole for answer in answers)
    # a server that starts once more reads all counts
    with open_server(directory, access, scratch) as server:
        (last,) = asyncio.run(_read_many(server, 1, 4))
    usage = read_usage_by_day(access / BUDGETS_FILE).values()
    counted = sum(count.requests for count in usage), sum(count.completion_tokens for count in usage)
    return {
        "kills": kills,
        "answered_requests": requests + 1,
        "whole_answers": whole + int(last.is_whole),
        "received_tokens": pieces + last.num_pieces,
        "counted_requests": counted[0],
        "counted_tokens": counted[1],
        "lost_requests": max(0, requests + 1 - counted[0]),
        "lost_tokens": max(0, pieces + last.num_pieces - counted[1]),
    }


async def _kill_under_load(server: ServedAddress, after_pieces: int) -> list[StreamAnswer]:
    """Let streams run until so many pieces have come, then end the server as a power cut would end it."""
    num_pieces = 0

    def count_piece() -> None:
        nonlocal num_pieces
        num_pieces += 1
        if num_pieces == after_pieces:
            os.kill(server.process.process_id, signal.SIGKILL)

    bodies = [_body(server, _STREAM_TOKENS, stream=True, text=f"Question {n}") for n in range(_KILL_STREAMS)]
    return await asyncio.gather(*(read_stream(server, body, count_piece) for body in bodies))
