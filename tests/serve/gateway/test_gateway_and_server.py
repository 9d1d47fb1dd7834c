"""The gateway before this program's own server, under many clients and many streams."""

import asyncio
import json
import os

import pytest
from running_gateway import WIDE, RunningGateway, backends

from access_keys import make_access
from late_imports import LateModule
from tiny_served import add_key, running_server, serve_model, write_model

anthropic = LateModule("anthropic")
openai = LateModule("openai")

MESSAGES = [{"role": "user", "content": "the thin man and"}]


@pytest.fixture(scope="module")
def before_own_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    inner = folder / "inner"
    _, engine_secret = add_key(inner, "gateway")
    (folder / "engine.key").touch(mode=0o600)
    (folder / "engine.key").write_text(engine_secret + "\n")
    keys = make_access(folder / "access")
    _, secret = keys.make(limits=WIDE)
    with running_server([serve_model(write_model(folder / "models"))], inner) as (url, _):
        engine = {
            "name": "own",
            "url": url,
            "models": {"small": "tiny"},
            "local": True,
            "routes": ["chat", "completions", "embeddings", "messages"],
            "secret_file": "engine.key",
        }
        outputs = dict.fromkeys(("terminal_controls", "hidden_characters", "secrets", "personal_data", "links"), "off")
        gateway = RunningGateway(folder, keys, {"backends": [engine], "filters": {"output": outputs}})
        yield gateway, secret, url, engine_secret
        assert gateway.stop() == 0


def test_greedy_text_is_the_same_with_and_without_the_gateway(before_own_server):
    gateway, secret, url, engine_secret = before_own_server
    answers = []
    for address, key, model in ((gateway.url, secret, "small"), (url, engine_secret, "tiny")):
        with openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
            options = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
            whole = client.chat.completions.create(**options)
            parts = list(client.chat.completions.create(**options, stream=True))
            scored = client.completions.create(
                model=model, prompt="the man", max_tokens=3, temperature=0, logprobs=2, echo=True
            )
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            answers.append(
                (whole.choices[0].message.content, text, scored.choices[0].model_dump(), whole.usage.total_tokens)
            )
            assert whole.model_extra["phalanx"]["model_digest"]
        with anthropic.Anthropic(base_url=address, api_key=key, max_retries=0) as client:
            message = client.messages.create(
                model=model, max_tokens=12, messages=MESSAGES, extra_body={"temperature": 0}
            )
            answers[-1] += (message.content[0].text, message.usage.output_tokens)

    assert answers[0] == answers[1]


def call_openai(client: "openai.OpenAI", number: int) -> None:
    """One of six kinds of call."""
    chat = client.chat.completions.create
    text = f"say answer {number}"
    messages = [{"role": "user", "content": text}]
    expected = text.removeprefix("say ")
    match number % 6:
        case 0:
            assert chat(model="small", messages=messages).choices[0].message.content == expected
        case 1:
            parts = chat(model="small", messages=messages, stream=True)
            assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
        case 2:
            tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
            assert chat(model="small", messages=messages, tools=tools).choices[0].finish_reason == "stop"
        case 3:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
            assert chat(model="small", messages=messages, response_format=form).usage.prompt_tokens == 7
        case 4:
            answer = client.completions.create(model="small", prompt=text, logprobs=1, n=2)
            assert [choice.text for choice in answer.choices] == [expected] * 2
        case _:
            with pytest.raises(openai.BadRequestError):
                chat(model="small", messages=messages, n=-1)


def call_anthropic(client: "anthropic.Anthropic", number: int) -> None:
    """One of four kinds of call."""
    messages = [{"role": "user", "content": f"say answer {number}"}]
    match number % 4:
        case 0:
            answer = client.messages.create(model="small", max_tokens=9, messages=messages)
            assert answer.content[0].text == f"answer {number}"
        case 1:
            with client.messages.stream(model="small", max_tokens=9, messages=messages) as stream:
                assert "".join(stream.text_stream) == f"answer {number}"
        case 2:
            tools = [{"name": "look_up", "input_schema": {"type": "object"}}]
            client.messages.create(
                model="small", max_tokens=9, messages=messages, tools=tools, extra_body={"temperature": 0.5}
            )
        case _:
            with pytest.raises(anthropic.BadRequestError):
                client.messages.create(model="small", max_tokens=513, messages=messages)


def test_sixty_calls_of_each_client(lab):
    with openai.OpenAI(base_url=f"{lab.gateway.url}/v1", api_key=lab.secret, max_retries=0) as client:
        for number in range(60):
            call_openai(client, number)
    with anthropic.Anthropic(base_url=lab.gateway.url, api_key=lab.secret, max_retries=0) as client:
        for number in range(60):
            call_anthropic(client, number)

    assert len(lab.local.requests) + len(lab.cloud.requests) == 50 + 45


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def open_stream(port: int, secret: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a stream that says its first word and then nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "wait"}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"first")
    return reader, writer


@pytest.mark.slow
def test_a_thousand_open_streams_take_little_memory_and_leave_room_for_others(lab, tmp_path):
    keys = make_access(tmp_path / "access")
    _, secret = keys.make(limits={**WIDE, "concurrency": 2000})
    key_id, other = keys.make("bob", limits=WIDE)
    engines = [{**engine, "max_concurrency": 1000} for engine in backends(lab.local, lab.cloud)]
    gateway = RunningGateway(tmp_path, keys, {"backends": engines, "health_every_s": 3600})
    before = resident_bytes(gateway.process.pid)

    async def hold_streams() -> list[int]:
        streams = []
        for _ in range(20):
            streams += await asyncio.gather(*(open_stream(gateway.port, secret) for _ in range(50)))
        answer = await asyncio.to_thread(gateway.ask, other)
        memory = resident_bytes(gateway.process.pid)
        for _, writer in streams:
            writer.close()
        return [len(streams), answer.status_code, memory]

    num_streams, status, memory = asyncio.run(hold_streams())

    assert (num_streams, status) == (1000, 200)
    assert memory - before < 300 * 1024 * 1024
    assert gateway.used(key_id)[0] == 1
    assert gateway.stop() == 0
