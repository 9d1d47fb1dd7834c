"""Engines behind a gateway that lie, flood or break: nothing but a bounded, filtered answer or an error comes out."""

import itertools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from raw_engine import EVENTS, HEAD, JSON, RawEngine
from running_gateway import WIDE, RunningGateway

from access_keys import make_access

PLANTED = "AKIA" + "QYLPMN5HNXJ6TY3B"
WORD = "quixotic-walrus"
ROUTES = ["chat", "completions", "embeddings", "messages"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    keys = make_access(folder / "access")
    key_id, secret = keys.make("alice", limits=WIDE)
    with RawEngine() as engine:
        backend = {"name": "raw", "url": engine.url, "models": {"small": "inner"}, "local": True, "routes": ROUTES}
        limits = {"max_answer_bytes": 2_000_000, "max_answer_s": 3}
        gateway = RunningGateway(folder, keys, {"backends": [backend], "health_every_s": 3600, "limits": limits})
        gateway.key_id, gateway.secret, gateway.engine = key_id, secret, engine
        yield gateway
        assert gateway.stop() == 0


def whole(choice=None, **more) -> dict:
    message = {"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "inner", "choices": [choice or message]}
    return {**answer, **more}


def with_message(**message) -> dict:
    return whole({"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"})


def with_call(call) -> dict:
    return with_message(content=None, tool_calls=call)


def call_of(name="f", arguments="{}", **more) -> dict:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


WRONG_ANSWERS = {
    "choices number": whole(choices=5),
    "choices null": whole(choices=None),
    "choices text": whole(choices=PLANTED),
    "choices object": whole(choices={"a": PLANTED}),
    "choices of null": whole(choices=[None, 5, PLANTED]),
    "no choices": {"id": "c"},
    "too many choices": whole(choices=[{"index": n, "message": {"content": "x"}} for n in range(5000)]),
    "choice of another number": whole({"index": 10**9, "message": {"role": "assistant", "content": "x"}}),
    "message number": whole({"index": 0, "message": 5}),
    "message text": whole({"index": 0, "message": PLANTED}),
    "content list": with_message(content=[{"type": "text", "text": PLANTED}]),
    "content object": with_message(content={"text": PLANTED}),
    "content number": with_message(content=5),
    "role": with_message(role=f"see {PLANTED}", content="x"),
    "reasoning object": with_message(content="x", reasoning_content={"a": PLANTED}),
    "audio": with_message(content="x", audio={"transcript": PLANTED}),
    "tool calls object": with_call({"a": PLANTED}),
    "tool calls of numbers": with_call([5, None]),
    "tool without function": with_call([{"id": "c", "type": "function"}]),
    "tool name object": with_call([call_of({"a": PLANTED})]),
    "tool name": with_call([call_of(PLANTED)]),
    "tool arguments list": with_call([call_of("f", [PLANTED])]),
    "tool arguments": with_call([call_of("f", json.dumps({"key": PLANTED}))]),
    "tool id": with_call([{**call_of(), "id": f"see {PLANTED}"}]),
    "tool extra": with_call([call_of(more=PLANTED)]),
    "log-probabilities nobody asked for": whole(
        {
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "logprobs": {"content": [{"token": PLANTED, "logprob": 0, "bytes": None, "top_logprobs": []}]},
            "finish_reason": "stop",
        }
    ),
    "finish object": whole({"index": 0, "message": {"content": "x"}, "finish_reason": {"a": PLANTED}}),
    "finish text": whole({"index": 0, "message": {"content": "x"}, "finish_reason": f"see {PLANTED}"}),
    "id": whole(id=f"see {PLANTED}"),
    "id object": whole(id={"a": PLANTED}),
    "long id": whole(id="x" * 500_000),
    "object": whole(object=f"see {PLANTED}"),
    "created text": whole(created=f"see {PLANTED}"),
    "fingerprint": whole(system_fingerprint=f"see {PLANTED}"),
    "model object": whole(model={"a": PLANTED}),
    "origin": whole(phalanx={"model_digest": PLANTED, "filters": [PLANTED], "marked": [PLANTED]}),
    "origin marks": whole(phalanx={"marked": [{"a": PLANTED}] * 1000}),
    "content of another protocol": whole(content=[{"type": "text", "text": PLANTED}], delta={"text": PLANTED}),
    "data of another route": whole(data=[PLANTED]),
    "usage list": whole(usage=[PLANTED]),
    "usage text": whole(usage={"prompt_tokens": PLANTED, "completion_tokens": 1e300}),
}
WRONG_BYTES = {
    "not a number": b'{"id": "c", "choices": [], "created": NaN}',
    "infinity": b'{"id": "c", "choices": [], "created": 1e400}',
    "infinite vector": b'{"id": "c", "object": "list", "data": [{"embedding": [1e400]}]}',
    "long number": b'{"id": "c", "created": ' + b"9" * 10_000 + b"}",
    "half a character": json.dumps(with_message(content="\ud800 x")).encode(),
    "half a character in a key": json.dumps(with_call([call_of("f", '{"\ud800": 1}')])).encode(),
    "bytes that are no text": b'{"id": "c", "choices": [{"index": 0, "message": {"content": "\xff\xfe"}}]}',
    "deep": b'{"id": ' + b"[" * 500_000,
    "deep and whole": b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}",
    "list": b"[]",
    "empty": b"",
    "markup": b"<html>/srv/models Traceback</html>",
}


@pytest.fixture
def log_start(hostile):
    return len(hostile.log_text())


def check_gateway(hostile, log_start: int) -> None:
    """Return where nothing has failed inside since then, and no text has come into the log."""
    log = hostile.log_text()[log_start:]
    assert hostile.process.poll() is None
    assert "Traceback" not in log, log[-2000:]
    assert PLANTED not in log
    assert WORD not in log


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [*WRONG_ANSWERS, *WRONG_BYTES])
def test_an_answer_of_another_form_is_cut_to_the_protocol_or_refused(hostile, log_start, name, stream):
    content = WRONG_BYTES.get(name) or json.dumps(WRONG_ANSWERS.get(name, "")).encode()
    prompt = f"{WORD} {name} {stream}"
    body = content
    if stream:
        # the same in a part of a stream
        part = content.replace(b'"message": ', b'"delta": ').replace(b"chat.completion", b"chat.completion.chunk")
        body = b"data: " + part + b"\n\ndata: [DONE]\n\n"
    hostile.engine.answers[prompt] = HEAD % (EVENTS if stream else JSON) + body

    answer = hostile.ask(hostile.secret, prompt, stream=stream)

    assert answer.status_code in {200, 403, 502}
    assert PLANTED not in answer.text
    assert "walrus" not in answer.text
    assert "/srv" not in answer.text
    assert len(answer.content) < 100_000
    if not stream:
        assert isinstance(answer.json(), dict)
    for line in answer.text.splitlines() if stream and answer.status_code == 200 else ():
        assert not line or line == "data: [DONE]" or isinstance(json.loads(line.removeprefix("data: ")), dict)
    answer.content.decode("utf-8")
    check_gateway(hostile, log_start)


START = {"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant", "content": []}}
WRONG_EVENTS = {
    "line inside a type": [{"type": f"ping\ndata: {PLANTED}\n\nevent: x"}],
    "unknown type": [{"type": "other", "delta": {"text": PLANTED}}],
    "type list": [{"type": [PLANTED]}],
    "text in a start": [
        START,
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": f"see {PLANTED} now"}},
        {"type": "content_block_stop", "index": 0},
    ],
    "input in a start": [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "input": {"a": PLANTED}}}
    ],
    "content in the first message": [
        {"type": "message_start", "message": {**START["message"], "content": [{"type": "text", "text": PLANTED}]}}
    ],
    "content of the message is text": [{"type": "message_start", "message": PLANTED}],
    "delta list": [{"type": "content_block_delta", "index": 0, "delta": [PLANTED]}],
    "unknown field of a delta": [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "x", "citation": PLANTED}}
    ],
    "name of a tool": [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "tool_use", "id": "t", "name": PLANTED, "input": {}},
        }
    ],
    "line inside the type of a delta": [
        {"type": "content_block_delta", "index": 0, "delta": {"type": f"see {PLANTED}", "text": "x"}},
        {"type": "content_block_stop", "index": 0},
    ],
    "signature": [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": f"see {PLANTED}"}}
    ],
    "stop sequence": [{"type": "message_delta", "delta": {"stop_reason": "stop_sequence", "stop_sequence": PLANTED}}],
    "stop reason": [{"type": "message_delta", "delta": {"stop_reason": {"a": PLANTED}}}],
    "index": [{"type": "content_block_delta", "index": PLANTED, "delta": {"type": "text_delta", "text": "x"}}],
    "many blocks": [
        {"type": "content_block_delta", "index": n, "delta": {"type": "text_delta", "text": "x"}} for n in range(20_000)
    ],
}


@pytest.mark.parametrize("name", WRONG_EVENTS)
def test_an_event_of_another_form_is_cut_to_the_protocol_or_refused(hostile, log_start, name):
    events = [*WRONG_EVENTS[name], {"type": "message_stop"}]
    stream = "".join(f"event: x\ndata: {json.dumps(event)}\n\n" for event in events)
    prompt = f"{WORD} {name}"
    hostile.engine.answers[prompt] = HEAD % EVENTS + stream.encode()
    body = {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": prompt}], "stream": True}

    with hostile.client(hostile.secret) as client:
        answer = client.post("/v1/messages", json=body)

    assert answer.status_code == 200
    assert PLANTED not in answer.text
    assert len(answer.content) < 1_000_000
    for line in answer.text.splitlines():
        kind, _, content = line.partition(": ")
        assert kind in {"", "event", "data"}
        assert kind != "data" or json.loads(content)["type"] == name_of(answer.text, line)
    check_gateway(hostile, log_start)


def name_of(text: str, line: str) -> str:
    """The name of the event that a line of data belongs to."""
    before = text[: text.index(line)].rstrip("\n")
    return before.rpartition("event: ")[2]


TOOL_ANSWERS = {
    "infinite argument": b'{"content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1e400}}]}',
    "secret argument": json.dumps(
        {"content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": [{PLANTED: "x"}]}}]}
    ).encode(),
    "name": json.dumps({"content": [{"type": "tool_use", "id": "t", "name": PLANTED, "input": {}}]}).encode(),
    "citation": json.dumps(
        {"content": [{"type": "text", "text": "x", "citations": [{"cited_text": PLANTED}]}]}
    ).encode(),
    "block of another kind": json.dumps({"content": [{"type": "web_search_tool_result", "content": PLANTED}]}).encode(),
    "no content": b"{}",
    "stop sequence": json.dumps({"content": [], "stop_sequence": PLANTED}).encode(),
}


@pytest.mark.parametrize("name", TOOL_ANSWERS)
def test_a_whole_message_of_another_form_is_cut_to_the_protocol_or_refused(hostile, log_start, name):
    hostile.engine.answers[name] = HEAD % JSON + TOOL_ANSWERS[name]
    body = {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": name}]}

    with hostile.client(hostile.secret) as client:
        answer = client.post("/v1/messages", json=body)

    assert answer.status_code in {200, 403, 502}
    assert PLANTED not in answer.text
    assert "Infinity" not in answer.text
    check_gateway(hostile, log_start)


def part_of(**choice) -> bytes:
    return b"data: " + json.dumps({"id": "c", "choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


def drip(pieces, every_s: float = 0.02):
    """Yield pieces again and again, slower than they could be read."""
    pause = threading.Event()
    while not pause.wait(every_s):
        yield pieces


def test_an_answer_that_drips_for_ever_ends_with_its_time_and_the_reservation_is_paid(hostile, log_start):
    comment, part = b": so far\n\n", part_of(delta={"content": "a "})
    endless = {
        "comments": (True, HEAD % EVENTS, comment),
        "parts": (True, HEAD % EVENTS, part),
        "half a line": (True, HEAD % EVENTS, b" "),
        "whole": (False, HEAD % JSON, b" "),
        "error": (False, b"HTTP/1.1 500 X\r\nConnection: close\r\n\r\n", b" "),
        "headers": (False, b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
        "informational": (False, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    }
    for name, (_, head, pieces) in endless.items():
        hostile.engine.answers[name] = itertools.chain([head], drip(pieces))
    before = hostile.used(hostile.key_id)

    with ThreadPoolExecutor(len(endless)) as pool:
        asked = {name: pool.submit(hostile.ask, hostile.secret, name, stream=case[0]) for name, case in endless.items()}
        answers = {name: answer.result() for name, answer in asked.items()}

    for name, (stream, *_) in endless.items():
        assert answers[name].status_code == (200 if stream else 502)
        assert "engine_failed" in answers[name].text or "answer_too_long" in answers[name].text, name
        assert "[DONE]" not in answers[name].text
    requests, _, completion = hostile.used(hostile.key_id)
    assert requests - before[0] == len(endless)
    assert completion - before[2] == len(endless) * 1024
    check_gateway(hostile, log_start)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


FLOODS = {
    "choices": lambda n: part_of(delta={"content": f"{n} "}).replace(b'"index": 0', b'"index": %d' % n),
    "tool calls": lambda n: part_of(delta={"tool_calls": [{"index": n, "function": {"arguments": "a"}}]}),
    "held back": lambda n: part_of(delta={"content": "A"}),
    "empty parts": lambda n: b'data: {"choices": []}\n\n',
    "logprobs": lambda n: part_of(delta={}, logprobs={"content": [{"token": "x" * 900, "logprob": 0}] * 9}),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_parts_ends_bounded_in_bytes_and_memory(hostile, log_start, name):
    hostile.engine.answers[name] = itertools.chain([HEAD % EVENTS], map(FLOODS[name], itertools.count()))
    before = resident_bytes(hostile.process.pid)

    answer = hostile.ask(hostile.secret, name, stream=True)

    assert answer.status_code == 200
    assert len(answer.content) < 8_000_000
    assert "engine_failed" in answer.text or "answer_too_long" in answer.text
    assert hostile.engine.broken.wait(60)
    assert resident_bytes(hostile.process.pid) - before < 64 * 1024 * 1024
    check_gateway(hostile, log_start)


def test_token_ids_of_several_prompts_are_all_reserved(hostile, tmp_path):
    keys = make_access(tmp_path / "access")
    key_id, secret = keys.make(limits=WIDE)
    backend = {"name": "raw", "url": hostile.engine.url, "models": {"small": "inner"}, "local": True, "routes": ROUTES}
    hostile.engine.answers = DefaultAnswers(HEAD % JSON + b"{}")
    config = {"backends": [backend], "limits": {"allow_token_prompts": True}, "health_every_s": 3600}
    gateway = RunningGateway(tmp_path, keys, config)

    with gateway.client(secret) as client:
        body = {"model": "small", "prompt": [[1, 2], [3], [4]], "max_tokens": 40, "n": 2}
        assert client.post("/v1/completions", json=body).status_code == 502

    assert gateway.used(key_id)[2] == 3 * 2 * 40
    assert gateway.stop() == 0


class DefaultAnswers(dict):
    """The same answer to every prompt."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def __getitem__(self, prompt: object) -> bytes:
        return self.answer
