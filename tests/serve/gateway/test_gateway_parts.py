"""Parts of a gateway without a network: its file, pieces of streams, TLS."""

import asyncio
import contextlib
import json
import resource
import select
import socket
import ssl
import time
from pathlib import Path

import httpx2
import pytest
from running_gateway import WIDE, RunningGateway, backends

from access_keys import make_access
from phalanx.cli import run_command
from phalanx.errors import ConfigError
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.serve.filters import TextFilters
from phalanx.serve.gateway import GatewayLimits, load_gateway_config
from phalanx.serve.gateway.answers import AnswerFacts
from phalanx.serve.gateway.requests import ROUTES, read_request
from phalanx.serve.gateway.streams import AnswerStream

ENGINE = '[[backends]]\nname = "a"\nurl = "http://127.0.0.1:1"\nmodels = { small = "x" }\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[listen]\nhost = "0.0.0.0"\n' + ENGINE, "can be reached by other machines"),
        ('[listen]\nhost = "::"\n' + ENGINE, "can be reached by other machines"),
        ('[listen]\nhost = "example.org"\n' + ENGINE, "can be reached by other machines"),
        ('[listen]\ncertificate = "a.pem"\n' + ENGINE, "go together"),
        ('[listen]\nclient_authority = "a.pem"\n' + ENGINE, "needs certificate"),
        (ENGINE.replace("http://127.0.0.1:1", "http://10.0.0.1:1"), "plain HTTP to another machine"),
        (ENGINE.replace("http://127.0.0.1:1", "http://a@127.0.0.1:1"), "expected such as"),
        (ENGINE.replace("http://127.0.0.1:1", "http://127.0.0.1:1/?a=b"), "expected such as"),
        (ENGINE.replace("http://127.0.0.1:1", "gopher://127.0.0.1:1"), "expected such as"),
        (ENGINE + ENGINE, "two have the same name"),
        (ENGINE + "loacl = true\n", "did you mean 'local'"),
        ("[bounds]\nmax_json_depth = 100000\n" + ENGINE, "max_json_depth"),
        ("", "backends: missing"),
    ],
)
def test_a_file_that_opens_a_door_by_mistake_is_refused(tmp_path, text, message):
    path = tmp_path / "gateway.toml"
    path.write_text(text.replace('= "http', "= 'http").replace(':1"', ":1'") if "\\" in text else text)

    with pytest.raises(ConfigError, match=message):
        load_gateway_config(path)


def test_paths_are_of_the_folder_of_the_file(tmp_path):
    path = tmp_path / "gateway.toml"
    path.write_text(ENGINE + 'secret_file = "engine.key"\n')

    config = load_gateway_config(path)

    assert config.access == tmp_path / "access"
    assert config.backends[0].secret_file == tmp_path / "engine.key"


def test_the_file_on_the_page_is_one(tmp_path):
    page = (Path(__file__).resolve().parents[3] / "docs" / "serving_keys.md").read_text(encoding="utf-8")
    path = tmp_path / "gateway.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])

    config = load_gateway_config(path)

    assert [backend.name for backend in config.backends] == ["here", "cloud"]
    assert [backend.local for backend in config.backends] == [True, False]


def test_check_reads_file_and_keys_and_ends(tmp_path, capsys):
    make_access(tmp_path / "access").make()
    (tmp_path / "gateway.toml").write_text(ENGINE)

    assert run_command(["gateway", str(tmp_path / "gateway.toml"), "--check", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["keys"], facts["models"], facts["engines"]) == (1, ["small"], ["a"])


def test_a_gateway_without_keys_does_not_start(tmp_path, capsys):
    (tmp_path / "gateway.toml").write_text(ENGINE)

    assert run_command(["gateway", str(tmp_path / "gateway.toml")]) == 5
    assert "operator.json" in capsys.readouterr().err


class FakeAnswer:
    """An answer that counts how much of it was asked for."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces, self.taken = pieces, 0

    async def read_pieces(self):
        for piece in self.pieces:
            self.taken += 1
            yield piece


def make_stream():
    body = {"model": "small", "messages": [{"role": "user", "content": "x"}], "stream": True}
    filters = TextFilters()
    request = read_request(ROUTES[0], json.dumps(body).encode(), "alice", GatewayLimits(), filters)
    return AnswerStream(request, filters, AnswerFacts(), GatewayLimits())


def chunk(text: str, finish=None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return (
        b"data: "
        + json.dumps({"id": "c", "object": "o", "created": 1, "model": "m", "choices": [choice]}).encode()
        + b"\r\n\r\n"
    )


def text_of(events: list[bytes]) -> str:
    parts = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
    return "".join(choice["delta"].get("content", "") for part in parts for choice in part["choices"])


def test_a_burst_of_short_events_leaves_turns_to_other_requests():
    """Where 40 clients read slowly from a fast engine, an honest one waited for all that lay in 40 sockets."""
    answer = FakeAnswer([b"".join(chunk(f"word {number} ") for number in range(200)) + b"data: [DONE]\n\n"])
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def relay_all() -> int:
        beside = asyncio.create_task(count_turns())
        events = [event async for event in make_stream().relay(answer, lambda: None)]
        beside.cancel()
        return len(events)

    num_events = asyncio.run(relay_all())

    assert num_events > 200
    assert turns >= 200


def test_a_piece_is_passed_on_before_the_next_is_read():
    answer = FakeAnswer([chunk(f"word {number} ") for number in range(100)])

    async def read_some() -> list[int]:
        taken = []
        async for _ in make_stream().relay(answer, lambda: None):
            taken.append(answer.taken)
            if len(taken) == 20:
                return taken
        return taken

    assert asyncio.run(read_some()) == list(range(1, 21))


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10**6])
def test_a_stream_has_the_same_text_wherever_the_network_cuts_it(size):
    text = "Ünïcödé, 12 words; and a li\u2028ne."
    data = b"".join(chunk(letter) for letter in text) + chunk("", "stop") + b": comment\n\nevent: x\ndata: [DONE]\n\n"
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    ends = []

    async def read_all() -> list[bytes]:
        return [event async for event in make_stream().relay(FakeAnswer(pieces), lambda: ends.append(1))]

    events = asyncio.run(read_all())
    assert text_of(events) == text
    assert events[-1] == b"data: [DONE]\n\n"
    assert ends == [1]


def test_a_line_in_pieces_of_one_byte_costs_no_more_than_its_length():
    """An engine that sends so, and a reader that joins what is there at each piece, would stop all other answers."""
    answer = FakeAnswer([b"x"] * 700_000)

    async def read_all() -> list[bytes]:
        return [event async for event in make_stream().relay(answer, lambda: None)]

    start = time.process_time()
    (last,) = asyncio.run(read_all())

    assert b"broke off" in last
    assert time.process_time() - start < 15


@pytest.fixture
def pki(tmp_path):
    create_authority(tmp_path / "pki")
    for name in ("gateway", "client"):
        issue_certificate(tmp_path / "pki", name)
    return tmp_path / "pki"


def test_tls_and_certificates_of_clients_are_asked_for(shared_lab, tmp_path, pki):
    keys = make_access(tmp_path / "access")
    _, secret = keys.make(limits=WIDE)
    listen = {
        "certificate": str(pki / "gateway" / "certificate.pem"),
        "private_key": str(pki / "gateway" / "tls.key"),
        "client_authority": str(pki / "authority.pem"),
    }
    gateway = RunningGateway(
        tmp_path, keys, {"listen": listen, "backends": backends(shared_lab.local, shared_lab.cloud)}
    )
    assert gateway.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=str(pki / "authority.pem"))

    with gateway.client(secret, verify=trusting) as stranger, pytest.raises(httpx2.HTTPError):
        stranger.get("/v1/models")
    trusting.load_cert_chain(pki / "client" / "certificate.pem", pki / "client" / "tls.key")
    with gateway.client(secret, verify=trusting) as client:
        assert client.get("/v1/models").status_code == 200
    with gateway.client(None, verify=trusting) as keyless:
        assert keyless.get("/v1/models").status_code == 401
    assert gateway.stop() == 0


def test_connections_that_never_begin_tls_are_bounded_too(shared_lab, tmp_path, pki):
    """Attacker: an address without a key that opens connections until the server has no file for another one."""
    keys = make_access(tmp_path / "access")
    _, secret = keys.make(limits=WIDE)
    listen = {
        "certificate": str(pki / "gateway" / "certificate.pem"),
        "private_key": str(pki / "gateway" / "tls.key"),
    }
    config = {
        "listen": listen,
        "backends": backends(shared_lab.local, shared_lab.cloud),
        "bounds": {"max_connections_per_address": 20},
    }
    gateway = RunningGateway(tmp_path, keys, config)
    silent = [socket.create_connection(("127.0.0.1", gateway.port), timeout=250) for _ in range(40)]

    for refused in silent[20:]:
        with contextlib.suppress(ConnectionResetError):
            assert refused.recv(1) == b""
    # those that are held have not been given up for their silence
    assert not select.select(silent[:20], [], [], 0)[0]
    for held in silent:
        held.close()
    assert gateway.list_models(secret).status_code == 200
    assert gateway.stop() == 0


def test_a_gateway_takes_as_many_files_as_its_connections_need(shared_lab, tmp_path):
    """Most systems begin with a limit of 1,024 files, below the connections of one address."""
    keys = make_access(tmp_path / "access")
    config = {"backends": backends(shared_lab.local, shared_lab.cloud), "bounds": {"max_connections": 400}}
    # the limit of the gateway alone: the process of the tests may have more files open already
    launcher = ("sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh")
    gateway = RunningGateway(tmp_path, keys, config, launcher)

    assert resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)[0] >= 800
    assert gateway.stop() == 0


@pytest.mark.parametrize(
    ("wish", "is_padded"), [(None, True), pytest.param(True, True, marks=pytest.mark.slow), (False, False)]
)
def test_a_stream_of_the_gateway_over_tls_has_events_of_one_length(shared_lab, tmp_path, pki, wish, is_padded):
    """Attacker: somebody on the way, who sees the length of each encrypted piece."""
    keys = make_access(tmp_path / "access")
    _, secret = keys.make(limits=WIDE)
    names = {"certificate": "certificate.pem", "private_key": "tls.key"}
    listen = {key: str(pki / "gateway" / name) for key, name in names.items()}
    engines = backends(shared_lab.local, shared_lab.cloud)
    gateway = RunningGateway(tmp_path, keys, {"listen": listen, "backends": engines})
    trusting = ssl.create_default_context(cafile=str(pki / "authority.pem"))
    content = "a wordthatislongerthanmostotherwordsare b, " * 3
    body = {"model": "small", "messages": [{"role": "user", "content": content}], "stream": True}
    body |= {} if wish is None else {"stream_options": {"include_obfuscation": wish}}

    with gateway.client(secret, verify=trusting) as client:
        answer = client.post("/v1/chat/completions", json=body)

    events = [part for part in answer.text.split("\n\n") if part.startswith("data: {")]
    texts = [json.loads(part[6:])["choices"][0]["delta"].get("content") for part in events]
    lengths = {len(part) for part, text in zip(events, texts, strict=True) if text}
    assert len({len(text) for text in texts if text}) > 1
    assert (len(lengths) == 1) == is_padded
    assert gateway.stop() == 0
