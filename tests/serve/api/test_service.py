"""What stands between a route and the engine: filters, budgets, revoked keys and marks."""

import asyncio
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from phalanx.security.crypto import read_public_signer
from phalanx.serve.access import (
    BUDGETS_FILE,
    LOG_FOLDER,
    SERVER_FILE,
    Access,
    KeyStore,
    make_reader_key,
    open_texts,
    read_usage_by_day,
    verify_request_log,
)
from phalanx.serve.api import Service
from phalanx.serve.engine import EnginePool, EngineSettings, GenerationRequest, SamplingSettings
from phalanx.serve.filters import FiltersConfig, TextFilters
from phalanx.serve.marks import MarkKeyRing, MarkPolicy, TokenMark, detect_mark
from phalanx.serve.marks.wrapper import make_wrapper
from tiny_served import NO_FILTERS, OPEN_LIMITS, UNMARKED, add_key, running_server, serve_model, write_model

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "the"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(directory):
    return serve_model(directory)


def open_client(url, secret):
    return httpx2.Client(base_url=url, headers={"authorization": f"Bearer {secret}"}, trust_env=False, timeout=250)


def read_lines(access):
    """What the log says of each request."""
    text = "".join(file.read_text() for file in (access / LOG_FOLDER).iterdir())
    # the last line may be on its way
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line["body"] for line in lines if line["kind"] == "request"]


def forced_text(text):
    """A form that makes the model write one text."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": text}}}}


def test_a_refused_output_ends_its_choice_and_shows_neither_text_nor_scores(served, tmp_path):
    _, secret = add_key(tmp_path / "access")
    topics = tmp_path / "topics.txt"
    topics.write_text("forbidden topic\n")
    output = {**NO_FILTERS.output.model_dump(), "topic_files": (topics,)}
    filters = FiltersConfig.model_validate({"output": output})
    body = {**BODY, **forced_text("harmless words, then the forbidden topic and more"), "max_tokens": 200}
    body |= {"logprobs": True}

    with (
        running_server([served], tmp_path / "access", filters=filters) as (url, _),
        open_client(url, secret) as http,
    ):
        whole = http.post(CHAT, json=body).json()
        stream = http.post(CHAT, json={**body, "stream": True}).text
        message = http.post(
            "/v1/messages", json={"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        )

    choice = whole["choices"][0]
    assert choice["finish_reason"] == "content_filter"
    assert whole["phalanx"]["refused_by"] == ["denied_topics"]
    assert message.status_code == 200
    events = [json.loads(block.removeprefix("data: ")) for block in stream.strip().split("\n\n")[:-1]]
    parts = [part for event in events for part in event["choices"]]
    texts = [choice["message"]["content"], "".join(part["delta"].get("content", "") for part in parts)]
    scores = [choice["logprobs"]["content"]]
    scores.append([score for part in parts if part["logprobs"] for score in part["logprobs"]["content"]])
    texts += ["".join(score["token"] for score in listed) for listed in scores]
    assert all("harmless" in text and "forbidden" not in text for text in texts)
    assert '"finish_reason": "content_filter"' in stream


def forced_call(arguments):
    """A tool, and a form that makes the model write a call of it."""
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    form = {"type": "grammar", "syntax": "regex", "definition": re.escape(text)}
    return {"tools": [{"type": "function", "function": {"name": "f"}}], "response_format": form, "max_tokens": 200}


@pytest.mark.parametrize("arguments", [r'{"a": "\ud83d"}', '{"a": NaN}', '{"a": 1e999}', '{"a": 1, "a": 2}'])
def test_a_call_that_cannot_be_sent_on_as_json_stays_text(served, tmp_path, arguments):
    _, secret = add_key(tmp_path / "access")

    with running_server([served], tmp_path / "access") as (url, _), open_client(url, secret) as http:
        answer = http.post(CHAT, json={**BODY, **forced_call(arguments)})

    assert answer.status_code == 200
    message = answer.json()["choices"][0]["message"]
    assert arguments in message["content"]
    assert "tool_calls" not in message


@pytest.mark.parametrize("word", [r"forbidden \u0074opic", r"forbidden\ntopic"])
def test_escapes_in_arguments_of_a_call_hide_nothing_from_the_filters(served, tmp_path, word):
    _, secret = add_key(tmp_path / "access")
    (tmp_path / "topics.txt").write_text("forbidden topic\n")
    output = {**NO_FILTERS.output.model_dump(), "topic_files": (tmp_path / "topics.txt",)}
    filters = FiltersConfig.model_validate({"output": output})
    body = {**BODY, **forced_call(f'{{"a": "{word}"}}')}

    with (
        running_server([served], tmp_path / "access", filters=filters) as (url, _),
        open_client(url, secret) as http,
    ):
        answer = http.post(CHAT, json=body)
        stream = http.post(CHAT, json={**body, "stream": True}).text

    assert answer.json()["choices"][0]["finish_reason"] == "content_filter"
    assert "forbidden topic" not in answer.text + stream


def test_texts_are_sealed_in_the_log_as_they_went_out(served, tmp_path):
    key_id, secret = add_key(tmp_path / "access")
    public = make_reader_key(tmp_path / "reader.key")
    (tmp_path / "topics.txt").write_text("forbidden topic\n")
    output = {**NO_FILTERS.output.model_dump(), "topic_files": (tmp_path / "topics.txt",)}
    filters = FiltersConfig.model_validate({"output": output})
    forced = {**BODY, **forced_text("harmless words, then the forbidden topic"), "max_tokens": 200, "stream": True}

    with (
        running_server([served], tmp_path / "access", filters=filters, seal_texts=public) as (url, _),
        open_client(url, secret) as http,
    ):
        whole = http.post(CHAT, json={**BODY, "n": 2}).json()
        http.post(CHAT, json=forced)
        wrapper = make_wrapper((24).to_bytes(4, "big") + b"jumb" + bytes(16))
        http.post("/v1/embeddings", json={"model": "tiny", "input": f"a heron{wrapper}"})

    lines = []
    access = tmp_path / "access"
    verify_request_log(access / LOG_FOLDER, read_public_signer(access / SERVER_FILE), lines.append)
    rows = [texts for line, texts in open_texts(lines, tmp_path / "reader.key", access) if line.body["key"] == key_id]
    assert [message["content"] for row in rows[:2] for message in row["prompts"][0]["messages"]] == ["the", "the"]
    assert rows[0]["answers"] == [choice["message"]["content"] for choice in whole["choices"]]
    assert "harmless" in rows[1]["answers"][0]
    assert "forbidden" not in rows[1]["answers"][0]
    assert rows[2] == {"prompts": [{"text": "a heron", "tools": []}], "answers": []}


def test_a_refused_input_is_400_and_names_the_filter(served, tmp_path):
    _, secret = add_key(tmp_path / "access")
    body = {**BODY, "messages": [{"role": "user", "content": "a\U000e0041\U000e0042b"}]}

    with running_server([served], tmp_path / "access") as (url, _), open_client(url, secret) as http:
        answer = http.post(CHAT, json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "content_filter"
    assert "hidden_characters" in answer.json()["error"]["message"]


def test_budgets_count_what_was_used_and_refuse_beyond(served, tmp_path):
    limits = OPEN_LIMITS.model_copy(update={"tokens_per_month": 60})
    key_id, secret = add_key(tmp_path / "access", limits=limits)

    with running_server([served], tmp_path / "access") as (url, _), open_client(url, secret) as http:
        first = http.post(CHAT, json=BODY).json()["usage"]
        refused = http.post(CHAT, json={**BODY, "max_tokens": 60})
        wrong = http.post(CHAT, json={**BODY, "temperature": 9})
        list(http.post(CHAT, json={**BODY, "stream": True}).iter_lines())

    assert (refused.status_code, wrong.status_code) == (429, 400)
    assert int(refused.headers["retry-after"]) >= 1
    (usage,) = read_usage_by_day(tmp_path / "access" / BUDGETS_FILE).values()
    # what is refused costs a request and no token, and a stream costs the same as a whole answer
    assert usage.requests == 4
    assert usage.prompt_tokens == 2 * first["prompt_tokens"]
    assert usage.completion_tokens == 2 * first["completion_tokens"]
    log = "".join(path.read_text() for path in (tmp_path / "access" / LOG_FOLDER).glob("*.jsonl"))
    assert sum(key_id in line for line in log.splitlines()) == 4


def test_a_client_that_leaves_pays_for_what_was_written(served, tmp_path):
    _, secret = add_key(tmp_path / "access", limits=OPEN_LIMITS.model_copy(update={"concurrency": 1}))
    body = {**BODY, "max_tokens": 900, "stream": True, "logit_bias": {"65": 100}}

    with running_server([served], tmp_path / "access") as (url, pool), open_client(url, secret) as http:
        with http.stream("POST", CHAT, json=body) as answer:
            next(answer.iter_lines())
        while pool.engines[0].num_running:
            pool.engines[0].served.token_names.text_of(0)
        status = 429
        while status == 429:
            # the one place of this key is given up a moment after the client has left
            status = http.post(CHAT, json=BODY).status_code

    assert status == 200
    (usage,) = read_usage_by_day(tmp_path / "access" / BUDGETS_FILE).values()
    assert usage.completion_tokens < 900
    answers = [(row["status"], row["sizes"]) for row in read_lines(tmp_path / "access") if row["sizes"]]
    assert [status for status, _ in answers] == [499, 200]
    assert sum(sizes["completion_tokens"] for _, sizes in answers) == usage.completion_tokens


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings"])
def test_a_client_that_leaves_before_its_whole_answer_has_none_in_the_log(served, tmp_path, path):
    _, secret = add_key(tmp_path / "access")
    body = {"model": "tiny", "max_tokens": 900, "logit_bias": {"65": 100}}
    body |= {"prompt": "a"} if path != CHAT else {"messages": BODY["messages"]}
    if path == "/v1/embeddings":
        body = {"model": "tiny", "input": ["a" * 1000] * 64}

    with running_server([served], tmp_path / "access") as (url, _):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as link:
            content = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {secret}\r\ncontent-type: application/json\r\n"
            link.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            while not any(
                usage.prompt_tokens for usage in read_usage_by_day(tmp_path / "access" / BUDGETS_FILE).values()
            ):
                pass
        while not (rows := read_lines(tmp_path / "access")):
            pass

    assert [row["status"] for row in rows] == [499]


def test_what_was_written_for_prompts_that_nobody_reads_is_paid(served, tmp_path):
    """All prompts of a call are written at once, and their texts are read one behind the other."""
    _, secret = add_key(tmp_path / "access")
    sampling = SamplingSettings(temperature=0, logit_bias={65: 100})
    requests = [
        GenerationRequest(model="tiny", owner="alice", text=letter * 3, max_tokens=20, sampling=sampling)
        for letter in "abcd"
    ]

    async def leave_early(service, pool, caller):
        reply = await service.open_reply(requests, caller, CHAT, service.begin_request(caller))
        while pool.engines[0].num_running or pool.engines[0].num_waiting:
            await asyncio.sleep(0.01)
        await anext(reply.read_events())
        await reply.close()

    with (
        Access.open(tmp_path / "access") as access,
        EnginePool([served], EngineSettings(), UNMARKED) as pool,
    ):
        caller = access.key_store.find_caller(secret, "127.0.0.1")
        asyncio.run(leave_early(Service(pool, access, TextFilters(NO_FILTERS)), pool, caller))

    (usage,) = read_usage_by_day(tmp_path / "access" / BUDGETS_FILE).values()
    assert (usage.prompt_tokens, usage.completion_tokens) == (4 * 3, 4 * 20)


def test_a_key_that_is_revoked_loses_its_stream(served, tmp_path, caplog):
    key_id, secret = add_key(tmp_path / "access")
    body = {**BODY, "max_tokens": 900, "stream": True, "logit_bias": {"65": 100}}

    with running_server([served], tmp_path / "access") as (url, pool), open_client(url, secret) as http:
        with pytest.raises(httpx2.RemoteProtocolError), http.stream("POST", CHAT, json=body) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number == 0:
                    KeyStore.open(tmp_path / "access").revoke_key(key_id)
        assert http.post(CHAT, json=BODY).status_code == 401
        while pool.engines[0].num_running:
            pool.engines[0].served.token_names.text_of(0)
    requests = read_lines(tmp_path / "access")
    # one line for the request, and none of a fault that was none
    assert [(request["key"], request["status"]) for request in requests] == [(key_id, 499)]
    assert "server_error" not in requests[0]["verdicts"]
    assert "Error" not in caplog.text.replace("ASGI callable", "")


def test_a_key_that_is_revoked_gets_no_whole_answer_and_the_log_says_so(served, tmp_path):
    key_id, secret = add_key(tmp_path / "access")
    body = {**BODY, "max_tokens": 900, "logit_bias": {"65": 100}}

    with (
        running_server([served], tmp_path / "access") as (url, pool),
        open_client(url, secret) as http,
        ThreadPoolExecutor(1) as aside,
    ):
        asked = aside.submit(http.post, CHAT, json=body)
        while not pool.engines[0].num_running:
            pool.engines[0].served.token_names.text_of(0)
        KeyStore.open(tmp_path / "access").revoke_key(key_id)
        assert asked.result().status_code == 401

    assert [row["status"] for row in read_lines(tmp_path / "access")] == [499]


def test_texts_are_marked_and_an_answer_says_how(served, tmp_path):
    ring = MarkKeyRing.create(tmp_path / "marks" / "ring.json")
    _, secret = add_key(tmp_path / "access")
    _, trusted = add_key(tmp_path / "access", "trusted", may_skip_mark=True)
    mark = TokenMark(MarkPolicy(mark="on"), ring.newest)
    # a text of few tokens is too short to be called marked
    no_end = {str(token): -100 for token in served.turn_ends}
    body = {**BODY, "max_tokens": 400, "temperature": 1.5, "logit_bias": no_end}

    with running_server([served], tmp_path / "access", mark=mark) as (url, pool):
        with open_client(url, secret) as http:
            marked = http.post(CHAT, json={**body, "logprobs": True}).json()
            greedy = http.post(CHAT, json=BODY).json()
            refused = http.post(CHAT, json={**body, "mark": False})
        with open_client(url, trusted) as http:
            plain = http.post(CHAT, json={**body, "mark": False}).json()
        names = pool.engines[0].served.token_names
        ids = {names.bytes_of(token): token for token in range(pool.engines[0].served.vocab_size)}
    # random weights write bytes that are no text: the tokens are read from the scores
    tokens = [ids[bytes(score["bytes"])] for score in marked["choices"][0]["logprobs"]["content"]]

    assert [answer["phalanx"]["marked"] for answer in (marked, greedy, plain)] == [
        ["gumbel"],
        ["bias"],
        ["no (caller)"],
    ]
    assert refused.status_code == 403
    assert detect_mark(tokens, ring.keys).verdict == "marked"


def test_a_full_queue_is_503_with_a_time(served, tmp_path):
    _, secret = add_key(tmp_path / "access")
    settings = EngineSettings(max_rows=1, max_waiting=1)
    long = {**BODY, "max_tokens": 900, "stream": True, "logit_bias": {"65": 100}}

    with (
        running_server([served], tmp_path / "access", engine=settings) as (url, _),
        open_client(url, secret) as http,
        http.stream("POST", CHAT, json=long) as running,
    ):
        # an iterator that nobody holds closes the stream
        events = running.iter_lines()
        next(events)
        answer = http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": ["a", "b", "c"], "max_tokens": 500, "logit_bias": {"65": 100}},
        )

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "overloaded"
    # no engine has read the refused prompts: they cost nothing, and the log has their one answer
    (usage,) = read_usage_by_day(tmp_path / "access" / BUDGETS_FILE).values()
    rows = read_lines(tmp_path / "access")
    assert sorted(row["status"] for row in rows) == [499, 503]
    assert usage.prompt_tokens == next(row["sizes"]["prompt_tokens"] for row in rows if row["status"] == 499)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a b c"}),
        (CHAT, {"messages": BODY["messages"]}),
        ("/v1/completions", {"prompt": "a"}),
    ],
)
def test_a_request_that_an_engine_refuses_before_it_works_costs_no_tokens(served, tmp_path, path, body):
    _, secret = add_key(tmp_path / "access")

    with running_server([served], tmp_path / "access") as (url, pool), open_client(url, secret) as http:
        pool.close()
        answer = http.post(path, json={"model": "tiny", **body})

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    (usage,) = read_usage_by_day(tmp_path / "access" / BUDGETS_FILE).values()
    assert (usage.requests, usage.prompt_tokens, usage.completion_tokens) == (1, 0, 0)
