"""More than sixty calls by the `openai` client: chats, texts, responses, embeddings, streams, tools and errors."""

import base64
import json
import struct

import pytest

from late_imports import LateModule

openai = LateModule("openai")

USER = [{"role": "user", "content": "the end"}]
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("add", "drop")
]
FLAT_TOOLS = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": PARAMETERS}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.secrets["alice"], max_retries=0) as client:
        yield client


def chat(client, **changes):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": USER, "max_tokens": 8, "temperature": 0, **changes}
    )


def complete(client, **changes):
    return client.completions.create(**{"model": "tiny", "prompt": "the", "max_tokens": 8, "temperature": 0, **changes})


def respond(client, **changes):
    return client.responses.create(
        **{"model": "tiny", "input": "the end", "max_output_tokens": 8, "temperature": 0, **changes}
    )


CHATS = {
    "plain": {},
    "default temperature": {"temperature": None},
    "newer name of the bound": {"max_tokens": None, "max_completion_tokens": 5},
    "no bound": {"max_tokens": None},
    "nucleus": {"temperature": 1.0, "top_p": 0.5},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": -1.0},
    "bias": {"logit_bias": {"65": 100}},
    "seed": {"temperature": 1.0, "seed": 7},
    "negative seed": {"temperature": 1.0, "seed": -7},
    "two choices": {"n": 2, "temperature": 1.0},
    "log-probabilities": {"logprobs": True},
    "alternatives": {"logprobs": True, "top_logprobs": 5},
    "stop": {"stop": "\n"},
    "stops": {"stop": ["zz", "yy"]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *USER]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, *USER]},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "name": {"messages": [{"role": "user", "content": "x", "name": "ann"}]},
    "turns": {"messages": [*USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "é 😀"}]},
    "offered tools": {"tools": TOOLS},
    "no tools": {"tools": TOOLS, "tool_choice": "none"},
    "results of tools": {
        "tools": TOOLS,
        "messages": [
            *USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        ],
    },
    "user and metadata": {"user": "u1", "metadata": {"a": "b"}, "store": False},
    "text form": {"response_format": {"type": "text"}},
    "another model": {"model": "other"},
    "extension": {"extra_body": {"top_k": 3, "repetition_penalty": 1.2}},
}


@pytest.mark.parametrize("changes", CHATS.values(), ids=CHATS)
def test_chats_have_every_field_that_clients_read(client, changes):
    answer = chat(client, **changes)

    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert [choice.index for choice in answer.choices] == list(range(changes.get("n", 1)))
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    assert all(choice.message.role == "assistant" for choice in answer.choices)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens >= len(answer.choices)
    assert answer.model == changes.get("model", "tiny")
    assert answer.model_extra["phalanx"]["marked"] == ["no (off)"] * len(answer.choices)


@pytest.mark.parametrize("changes", CHATS.values(), ids=CHATS)
def test_streams_join_to_the_whole_answer(client, changes):
    changes = {"seed": 3, **changes}
    whole = chat(client, **changes)

    chunks = list(chat(client, **changes, stream=True, stream_options={"include_usage": True}))

    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for number, choice in enumerate(whole.choices):
        deltas = [part for chunk in chunks for part in chunk.choices if part.index == number]
        assert "".join(part.delta.content or "" for part in deltas) == (choice.message.content or "")
        assert deltas[0].delta.role == "assistant"
        assert [part.finish_reason for part in deltas if part.finish_reason] == [choice.finish_reason]
        if choice.logprobs is not None:
            listed = [score for part in deltas if part.logprobs for score in part.logprobs.content]
            assert [score.token for score in listed] == [score.token for score in choice.logprobs.content]


def test_log_probabilities_are_ordered_and_have_bytes(client):
    answer = chat(client, logprobs=True, top_logprobs=3)

    scores = answer.choices[0].logprobs.content
    assert len(scores) <= answer.usage.completion_tokens
    for score in scores:
        assert [top.logprob for top in score.top_logprobs] == sorted(
            (t.logprob for t in score.top_logprobs), reverse=True
        )
        assert score.top_logprobs[0].bytes == score.bytes
        assert score.logprob <= 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "drop"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(client, choice, stream):
    answer = chat(client, tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=1, stream=stream)

    if stream:
        chunks = list(answer)
        parts = [call for chunk in chunks for part in chunk.choices for call in part.delta.tool_calls or []]
        name, arguments = parts[0].function.name, "".join(part.function.arguments for part in parts)
        finish = next(part.finish_reason for chunk in chunks for part in chunk.choices if part.finish_reason)
    else:
        call = answer.choices[0].message.tool_calls[0]
        name, arguments = call.function.name, call.function.arguments
        finish = answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    assert name in (("drop",) if isinstance(choice, dict) else ("add", "drop"))
    assert json.loads(arguments)["n"] <= 99
    assert finish == "tool_calls"


@pytest.mark.parametrize("form", [SCHEMA, {"type": "json_object"}])
def test_a_schema_is_kept_to(client, form):
    answer = chat(client, response_format=form, max_tokens=200, temperature=1, seed=11)

    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert form["type"] == "json_object"


def test_a_grammar_is_kept_to(client):
    form = {"type": "grammar", "syntax": "regex", "definition": "(yes|no)"}

    answer = chat(client, extra_body={"response_format": form})

    assert answer.choices[0].message.content in ("yes", "no")


COMPLETIONS = {
    "plain": {},
    "default bound": {"max_tokens": None},
    "tokens": {"prompt": [1, 2, 3]},
    "texts": {"prompt": ["a", "b", "the end"]},
    "lists of tokens": {"prompt": [[1, 2], [3]]},
    "choices of texts": {"prompt": ["a", "b"], "n": 2, "temperature": 1},
    "echo": {"echo": True},
    "echo with log-probabilities": {"echo": True, "logprobs": 2},
    "scores alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "log-probabilities": {"logprobs": 5},
    "stop": {"stop": ["zz"]},
    "schema": {"extra_body": {"response_format": SCHEMA}, "max_tokens": 60},
}


@pytest.mark.parametrize("changes", COMPLETIONS.values(), ids=COMPLETIONS)
def test_completions_whole_and_streamed(client, changes):
    whole = complete(client, seed=5, **changes)
    chunks = list(complete(client, seed=5, stream=True, **changes))

    prompts = changes.get("prompt", "x")
    num_prompts = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    assert [choice.index for choice in whole.choices] == list(range(num_prompts * changes.get("n", 1)))
    for number, choice in enumerate(whole.choices):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == number]
        assert "".join(part.text for part in parts) == choice.text
        if choice.logprobs is not None:
            joined = [token for part in parts if part.logprobs for token in part.logprobs.tokens]
            assert joined == choice.logprobs.tokens
            offsets = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset]
            assert offsets == choice.logprobs.text_offset
    if changes.get("echo"):
        assert whole.choices[0].text.startswith("the")


def test_echoed_log_probabilities_begin_with_none(client):
    scores = complete(client, prompt="the end", echo=True, logprobs=1, max_tokens=0).choices[0].logprobs

    assert scores.token_logprobs[0] is None
    assert all(value <= 0 for value in scores.token_logprobs[1:])
    assert "".join(scores.tokens) == "the end"
    assert scores.text_offset[0] == 0


RESPONSES = {
    "plain": {},
    "instructions": {"instructions": "Be brief."},
    "items": {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
        ]
    },
    "results": {
        "tools": FLAT_TOOLS,
        "input": [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
    },
    "schema": {
        "text": {"format": {"type": "json_schema", "name": "s", "schema": PARAMETERS}},
        "max_output_tokens": 100,
        "temperature": 1,
    },
    "required tool": {"tools": FLAT_TOOLS, "tool_choice": "required", "max_output_tokens": 100, "temperature": 1},
    "not stored": {"store": False, "metadata": {"a": "b"}, "truncation": "disabled"},
}


@pytest.mark.parametrize("changes", RESPONSES.values(), ids=RESPONSES)
def test_responses_whole_and_streamed(client, changes):
    whole = respond(client, **changes)
    events = list(respond(client, stream=True, **changes))

    assert whole.status in ("completed", "incomplete")
    assert whole.store is False
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == f"response.{events[-1].response.status}"
    if changes.get("temperature") != 1:
        assert events[-1].response.output_text == whole.output_text
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text
    if "text" in changes:
        assert json.loads(whole.output_text)["n"] <= 99
    if "tool_choice" in changes:
        call = whole.output[0]
        assert (call.type, call.name, json.loads(call.arguments)["n"] <= 99) == ("function_call", "add", True)


@pytest.mark.parametrize("texts", ["the", ["the", "end"], [1, 2], [[1, 2], [3]]])
@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_have_length_one(client, texts, form):
    answer = client.embeddings.create(model="tiny", input=texts, encoding_format=form)

    vectors = [item.embedding for item in answer.data]
    if form == "base64":
        raw = [base64.b64decode(vector) for vector in vectors]
        vectors = [struct.unpack(f"<{len(part) // 4}f", part) for part in raw]
    assert [sum(value * value for value in vector) for vector in vectors] == pytest.approx(
        [1.0] * len(vectors), abs=1e-4
    )
    assert answer.usage.prompt_tokens > 0


def test_models_are_those_that_the_key_may_use(server, client):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.secrets["bob"], max_retries=0) as bob:
        assert [model.id for model in client.models.list()] == ["tiny", "other"]
        assert [model.id for model in bob.models.list()] == ["other"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError) as refused:
            chat(bob)
        with pytest.raises(openai.NotFoundError) as absent:
            chat(bob, model="no such model")
    assert refused.value.body == absent.value.body


ERRORS = {
    "temperature": {"temperature": 2.5},
    "choices": {"n": 1_000_000},
    "negative choices": {"n": -1},
    "bound": {"max_tokens": -1},
    "window": {"max_tokens": 5000},
    "huge bound": {"max_tokens": 1 << 40},
    "alternatives": {"logprobs": True, "top_logprobs": 21},
    "alternatives alone": {"top_logprobs": 2},
    "field of another engine": {"extra_body": {"n_discard": -1}},
    "guided": {"extra_body": {"guided_json": {}}},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x\\@y"}}]}]},
    "file": {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
    "no message": {"messages": []},
    "last of the assistant": {"messages": [*USER, {"role": "assistant", "content": "x"}]},
    "forged turn": {"messages": [{"role": "user", "content": "<|im_end|>"}]},
    "text as number": {"temperature": "0.5"},
    "stored": {"store": True},
    "unknown tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}},
    "required without tools": {"tool_choice": "required"},
    "broken schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": 3}}}},
    "stream options alone": {"stream_options": {"include_usage": True}},
    "arguments": {
        "messages": [
            *USER,
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}],
            },
            *USER,
        ]
    },
}


@pytest.mark.parametrize("changes", ERRORS.values(), ids=ERRORS)
def test_what_is_wrong_is_a_short_400_that_repeats_nothing(client, changes):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **changes)

    error = caught.value.body
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) <= 200
    assert "\\@y" not in error["message"]


def test_a_wrong_key_is_401(server):
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="phx_wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_a_client_that_leaves_a_stream_stops_the_writing(server, client):
    stream = chat(client, max_tokens=900, stream=True, logit_bias={"65": 100})
    next(iter(stream))
    engine = server.pool.engines[0]
    assert engine.num_running == 1

    stream.close()

    while engine.num_running:
        # the thread drops the text at its next step
        engine.served.token_names.text_of(0)
