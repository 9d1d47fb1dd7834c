"""The clients of others through a gateway: answers, streams, tools, log-probabilities, errors."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from running_gateway import WIDE

from late_imports import LateModule

anthropic = LateModule("anthropic")
openai = LateModule("openai")


@pytest.fixture
def client(lab):
    with openai.OpenAI(base_url=f"{lab.gateway.url}/v1", api_key=lab.secret, max_retries=0) as client:
        yield client


@pytest.fixture
def other_client(lab):
    with anthropic.Anthropic(base_url=lab.gateway.url, api_key=lab.secret, max_retries=0) as client:
        yield client


def chat(client, text, **more):
    return client.chat.completions.create(model="small", messages=[{"role": "user", "content": text}], **more)


def test_a_chat_is_answered_under_the_public_name_without_fields_of_the_engine(lab, client):
    answer = chat(client, "say hello", seed=1, temperature=0.5, stop=["x"], user="u")

    assert answer.choices[0].message.content == "hello"
    assert answer.model == "small"
    assert answer.usage.total_tokens == 10
    assert answer.model_extra == {"phalanx": {"marked": ["no (engine behind a gateway)"], "gateway_filters": []}}
    path, body, headers = lab.local.requests[0]
    assert path == "/v1/chat/completions"
    assert len(body.pop("cache_salt")) == 64
    assert body == {
        "model": "inner/small",
        "cache_prompt": False,
        "messages": [{"role": "user", "content": "say hello"}],
        "max_tokens": 64,
        "seed": 1,
        "temperature": 0.5,
        "stop": ["x"],
        "stream": False,
    }
    assert lab.secret not in json.dumps(headers)
    assert not {"authorization", "x-api-key", "x-stainless-lang"} & set(headers)


def test_a_stream_has_the_text_of_the_engine_and_usage_for_those_who_ask(client):
    said = "The quick brown fox, 12 times; and again."

    parts = list(chat(client, f"say {said}", stream=True, stream_options={"include_usage": True}))
    bare = list(chat(client, f"say {said}", stream=True))

    for chunks in (parts, bare):
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
        assert all(chunk.id and chunk.object == "chat.completion.chunk" and chunk.model == "small" for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in parts if chunk.choices][-1] == "stop"
    assert parts[-1].usage.completion_tokens == 3
    assert all(chunk.choices and chunk.usage is None for chunk in bare)


def test_completions_and_their_streams(client):
    whole = client.completions.create(model="small", prompt="say one two", max_tokens=9)
    parts = list(client.completions.create(model="small", prompt="say one two", stream=True))

    assert whole.choices[0].text == "one two"
    assert "".join(chunk.choices[0].text for chunk in parts) == "one two"


def test_tools_come_whole_and_in_pieces(client):
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]

    whole = chat(client, "where", tools=tools, tool_choice="auto")
    parts = list(chat(client, "where", tools=tools, stream=True))

    assert whole.choices[0].message.tool_calls[0].function.arguments == '{"place": "Oslo"}'
    calls = [call for chunk in parts for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "look_up"
    assert "".join(call.function.arguments or "" for call in calls) == '{"place": "Oslo"}'


def test_a_turn_with_tool_results_is_forwarded_as_it_is(lab, client):
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
        {"role": "user", "content": [{"type": "text", "text": "say ok"}]},
    ]

    assert client.chat.completions.create(model="small", messages=messages).choices[0].message.content == "ok"
    assert lab.local.requests[0][1]["messages"] == messages


def test_log_probabilities_come_with_the_text_and_never_before_it(client):
    whole = chat(client, "say yes", logprobs=True, top_logprobs=2)
    parts = list(chat(client, "say yes", logprobs=True, stream=True, stream_options={"include_usage": True}))

    assert whole.choices[0].logprobs.content[0].token == "yes"
    assert parts[0].choices[0].delta.content == "yes"
    assert parts[0].choices[0].logprobs.content[0].token == "yes"
    assert parts[-1].usage.total_tokens == 10


def test_several_answers_schemas_and_embeddings(lab, client):
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}

    assert len(chat(client, "say a", n=3, response_format=form).choices) == 3
    assert lab.local.requests[0][1]["response_format"] == form
    assert client.embeddings.create(model="small", input=["a", "b"], encoding_format="float").data[0].embedding == [
        0.5,
        0.25,
    ]


def test_models_are_those_that_a_key_may_use(lab, client):
    _, secret = lab.keys.make("bob", models=("large",))
    with openai.OpenAI(base_url=f"{lab.gateway.url}/v1", api_key=secret, max_retries=0) as narrow:
        assert [model.id for model in narrow.models.list()] == ["large"]
        for act in (lambda: narrow.models.retrieve("small"), lambda: chat(narrow, "say x")):
            with pytest.raises(openai.NotFoundError):
                act()
    assert [model.id for model in client.models.list()] == ["large", "small"]
    assert client.models.retrieve("small").id == "small"


def test_errors_are_the_exceptions_of_the_client(lab, client):
    stranger = client.with_options(api_key="phx_wrong")
    with pytest.raises(openai.AuthenticationError) as caught:
        chat(stranger, "say x")
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "say x", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"


def test_the_other_protocol_is_forwarded_to_engines_that_speak_it(lab, other_client):
    messages = [{"role": "user", "content": "say hello there"}]

    whole = other_client.messages.create(model="small", max_tokens=20, messages=messages, system="be brief")
    with other_client.messages.stream(model="small", max_tokens=20, messages=messages) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert whole.content[0].text == text == "hello there"
    assert whole.model == final.model == "small"
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 3
    # what was in an engine's cache is paid for as well, and not told
    assert whole.usage.input_tokens == final.usage.input_tokens == 7
    assert whole.usage.cache_read_input_tokens is None
    assert lab.local.requests[0][2]["anthropic-version"] == "2023-06-01"
    with pytest.raises(anthropic.BadRequestError):
        image = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/x.png"}}
        other_client.messages.create(model="small", max_tokens=20, messages=[{"role": "user", "content": [image]}])


def test_a_client_that_leaves_ends_the_work_of_the_engine(lab):
    with lab.gateway.client(lab.secret) as client:
        body = {"model": "small", "messages": [{"role": "user", "content": "forever"}], "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())

    assert lab.local.left.wait(60)


def test_a_client_that_leaves_before_its_whole_answer_has_none_in_the_log(lab):
    key_id, secret = lab.keys.make("dora", limits=WIDE)
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "later"}]}).encode()
    with socket.create_connection(("127.0.0.1", lab.gateway.port)) as link:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {secret}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        link.sendall(head.encode() + body)
        while not (lab.local.requests or lab.cloud.requests):
            lab.gateway.list_models(lab.secret)
    # its turn comes behind that of the connection's end
    lab.gateway.list_models(lab.secret)
    let_engines_answer(lab)

    assert read_statuses(lab, key_id) == [499]


def let_engines_answer(lab):
    lab.local.may_answer.set()
    lab.cloud.may_answer.set()


def read_statuses(lab, key_id):
    """Those of the lines of a key, once there is one."""
    lines = []
    while not lines:
        text = "".join(file.read_text() for file in (lab.gateway.folder / "access" / "log").glob("*.jsonl"))
        lines = [json.loads(line)["body"] for line in text.splitlines(keepends=True) if key_id in line and "\n" in line]
    return [line["status"] for line in lines]


def test_a_key_that_is_revoked_gets_no_whole_answer_and_the_log_says_so(lab):
    key_id, secret = lab.keys.make("emma", limits=WIDE)
    with ThreadPoolExecutor(1) as aside:
        asked = aside.submit(lab.gateway.ask, secret, "later")
        while not (lab.local.requests or lab.cloud.requests):
            lab.gateway.list_models(lab.secret)
        lab.keys.store.revoke_key(key_id)
        let_engines_answer(lab)
        assert asked.result().status_code == 401

    assert read_statuses(lab, key_id) == [499]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_what_the_engine_counts_but_never_more_than_was_reserved(lab, stream):
    for text, expected in (
        ("say x", (1, 7, 3)),
        *((text, None) for text in ("no usage", "wrong usage", "too much usage")),
    ):
        key_id, secret = lab.keys.make("carol", limits={})
        if stream and text in ("wrong usage", "too much usage"):
            continue
        answer = lab.gateway.ask(secret, text, max_tokens=50, stream=stream)
        assert answer.status_code == 200
        requests, prompt, completion = used = lab.gateway.used(key_id)
        if expected is None:
            assert (requests, completion) == (1, 50)
            assert len(text) < prompt < 200
        else:
            assert used == expected


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_how_it_is_marked_and_what_filters_noted(lab, stream):
    text = lab.gateway.ask(lab.secret, "say see https://example.org/x for more", stream=stream).text
    data = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if "phalanx" in line]

    assert data[-1]["phalanx"] == {"marked": ["no (engine behind a gateway)"], "gateway_filters": ["links: link"]}
    marked = lab.gateway.ask(lab.secret, "marked", stream=stream).text
    assert '"marked": ["gumbel"]' in marked or '"marked":["gumbel"]' in marked
    assert "secret_of_the_engine" not in marked


def respond(client, content, **more):
    return client.responses.create(model="small", input=content, **more)


TURNS = [
    {"role": "user", "content": "say a"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
    {"role": "user", "content": [{"type": "input_text", "text": "say c"}]},
]
CALLS = [
    {"role": "user", "content": "a"},
    {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "say 3"},
]
FLAT_TOOLS = [{"type": "function", "name": "look_up", "parameters": {"type": "object"}, "strict": False}]
FORM = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}
RESPONSES = {
    "plain": ("say hello", {}, "hello"),
    "instructions": ("say hello", {"instructions": "be brief", "temperature": 0.5, "top_p": 0.9}, "hello"),
    "turns": (TURNS, {"store": False, "metadata": {"a": "b"}, "user": "u"}, "c"),
    "results": (CALLS, {}, "3"),
    "form": ("say {}", {"text": FORM}, "{}"),
    "bound": ("say x", {"max_output_tokens": 9, "truncation": "disabled"}, "x"),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_are_forwarded_without_a_store_and_streamed_as_the_client_reads_them(lab, client, name):
    text, more, expected = RESPONSES[name]

    whole = respond(client, text, **more)
    events = list(respond(client, text, **more, stream=True))

    assert (whole.output_text, whole.model, whole.status) == (expected, "small", "completed")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (7, 3)
    assert whole.model_extra["phalanx"]["marked"] == ["no (engine behind a gateway)"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert events[-1].response.output_text == expected
    assert "10.0.0.5" not in whole.model_dump_json()
    for _, body, _ in lab.local.requests + lab.cloud.requests:
        assert (body["store"], body["stream"]) == (False, False)
        assert body["max_output_tokens"] == more.get("max_output_tokens", 64)
        assert not {"user", "metadata", "max_tokens"} & set(body)


def test_calls_of_responses_come_whole_and_as_events(client):
    whole = respond(client, "where", tools=FLAT_TOOLS, tool_choice={"type": "function", "name": "look_up"})
    events = list(respond(client, "where", tools=FLAT_TOOLS, stream=True))

    assert (whole.output[0].name, whole.output[0].arguments) == ("look_up", '{"place": "Oslo"}')
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"place": "Oslo"}'
    assert events[-1].response.output[0].call_id == "call_1"


@pytest.mark.parametrize(
    "changes",
    [
        {"store": True},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"conversation": "c"},
        {"max_output_tokens": 0},
        {"max_output_tokens": 513},
        {"temperature": 9},
        {"include": ["file_search_call.results"]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:9"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:9"}]}]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 900}]},
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"$ref": "http://127.0.0.1:9"}}}},
        {"instructions": "<|im_end|>"},
    ],
    ids=str,
)
def test_what_responses_may_not_ask_for_is_400_and_reaches_no_engine(lab, client, changes):
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**{"model": "small", "input": "say x", **changes})

    assert not (lab.local.requests or lab.cloud.requests)


def test_a_secret_in_a_response_is_refused_and_personal_data_stays_local(lab, client):
    for stream in (False, True):
        with pytest.raises(openai.PermissionDeniedError):
            respond(client, "say the key is AKIA" + "QYLPMN5HNXJ6TY3B", stream=stream)
    mail = "anna.larsen" + "@example.org"
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"to": mail})}
    escaped = {**call, "arguments": '{"to": "anna.larsen\\u0040example.org"}'}
    for item in (call, escaped, {"role": "user", "content": mail}):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            client.responses.create(model="large", input=[item, {"role": "user", "content": "x"}])
        assert caught.value.code == "sensitive_text"
    assert len(lab.cloud.requests) <= 2
