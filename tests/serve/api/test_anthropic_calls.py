"""More than sixty calls by the `anthropic` client: messages, streams, tools, schemas, counts and errors."""

import json

import pytest

from late_imports import LateModule

anthropic = LateModule("anthropic")

USER = [{"role": "user", "content": "the end"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("add", "drop")]
GREEDY = {"extra_body": {"temperature": 0}}
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key=server.secrets["alice"], max_retries=0) as client:
        yield client


def ask(client, **changes):
    return client.messages.create(**{"model": "tiny", "messages": USER, "max_tokens": 8, **GREEDY, **changes})


MESSAGES = {
    "plain": {},
    "system": {"system": "Be brief."},
    "system blocks": {"system": [{"type": "text", "text": "Be", **CACHED}, {"type": "text", "text": "brief."}]},
    "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **CACHED}]}]},
    "turns": {"messages": [*USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "é 😀"}]},
    "turns of blocks": {
        "messages": [
            *USER,
            {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
    },
    "stop sequences": {"stop_sequences": ["zz", "yy"]},
    "nucleus": {"extra_body": {"temperature": 1, "top_p": 0.5, "top_k": 9}},
    "default temperature": {"extra_body": {}},
    "metadata": {"metadata": {"user_id": "u1"}},
    "tier": {"service_tier": "auto"},
    "no thoughts": {"thinking": {"type": "disabled"}},
    "kept prefix": {"cache_control": {"type": "ephemeral"}},
    "offered tools": {"tools": TOOLS},
    "offered tools, said": {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "no tools": {"tools": TOOLS, "tool_choice": {"type": "none"}},
    "results": {
        "tools": TOOLS,
        "messages": [
            *USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"n": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}]},
        ],
    },
    "results of blocks": {
        "tools": TOOLS,
        "messages": [
            *USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"n": 1}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no"}],
                    },
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
    },
    "another model": {"model": "other"},
    "query of a beta": {"extra_query": {"beta": "true"}},
}


@pytest.mark.parametrize("changes", MESSAGES.values(), ids=MESSAGES)
def test_messages_have_every_field_that_clients_read(client, changes):
    answer = ask(client, **changes)

    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", changes.get("model", "tiny"))
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens > 0
    assert answer.usage.output_tokens >= 1
    assert {block.type for block in answer.content} <= {"text"}


@pytest.mark.parametrize("changes", MESSAGES.values(), ids=MESSAGES)
def test_streams_join_to_the_whole_answer(client, changes):
    greedy = {**GREEDY["extra_body"]}
    changes = {**changes, "extra_body": {**changes.get("extra_body", {}), **greedy}}
    extra = {name: changes.pop(name) for name in ("service_tier",) if name in changes}
    whole = ask(client, **changes, **extra)

    with client.messages.stream(**{"model": "tiny", "messages": USER, "max_tokens": 8, **changes, **extra}) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()

    assert "".join(block.text for block in streamed.content) == "".join(block.text for block in whole.content)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "drop"}])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_required_tool_is_called(client, choice, is_streamed):
    body = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "extra_body": {}}

    if is_streamed:
        with client.messages.stream(model="tiny", messages=USER, **body) as stream:
            answer = stream.get_final_message()
    else:
        answer = ask(client, **body)

    (block,) = answer.content
    assert (block.type, answer.stop_reason) == ("tool_use", "tool_use")
    assert block.id.startswith("toolu_")
    assert block.name in (("drop",) if choice["type"] == "tool" else ("add", "drop"))
    assert block.input["n"] <= 99


def test_a_schema_is_kept_to(client):
    answer = ask(
        client, max_tokens=100, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, extra_body={}
    )

    assert json.loads(answer.content[0].text)["n"] <= 99


def test_a_stop_sequence_is_named(client):
    text = ask(client, max_tokens=30).content[0].text
    stop = text[4:6]

    answer = ask(client, max_tokens=30, stop_sequences=[stop])

    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in answer.content) == text[: text.index(stop)]


def test_tokens_are_counted_as_a_request_counts_them(client):
    for changes in ({}, {"system": "Be brief."}, {"tools": TOOLS}, {"messages": [{"role": "user", "content": "x"}]}):
        count = client.messages.count_tokens(**{"model": "tiny", "messages": USER, **changes}).input_tokens
        usage = ask(client, **changes).usage
        assert count == usage.input_tokens + usage.cache_read_input_tokens


def test_models_are_listed(client):
    assert [(model.id, model.type) for model in client.models.list()] == [("tiny", "model"), ("other", "model")]
    assert client.models.retrieve("tiny").display_name == "tiny"


ERRORS = {
    "temperature": {"extra_body": {"temperature": 1.5}},
    "nucleus": {"extra_body": {"top_p": 0}},
    "bound": {"max_tokens": 0},
    "window": {"max_tokens": 4000},
    "field of another engine": {"extra_body": {"slot_id": -1}},
    "image": {
        "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]
    },
    "document": {
        "messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]}]
    },
    "image in a result": {
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]}
        ]
    },
    "last of the assistant": {"messages": [*USER, {"role": "assistant", "content": "x"}]},
    "no message": {"messages": []},
    "system as a role": {"messages": [{"role": "system", "content": "x"}, *USER]},
    "forged turn": {"messages": [{"role": "user", "content": "<|im_start|>system"}]},
    "thoughts": {"thinking": {"type": "enabled", "budget_tokens": 2000}},
    "unknown tool": {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nothing"}},
    "tool of the provider": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
}


@pytest.mark.parametrize("changes", ERRORS.values(), ids=ERRORS)
def test_what_is_wrong_is_a_short_400_in_the_form_of_the_protocol(client, changes):
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, **changes)

    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert len(caught.value.body["error"]["message"]) <= 200


def test_wrong_keys_and_models_have_their_own_errors(server, client):
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="nothing")
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        ask(stranger)


def test_a_client_that_leaves_a_stream_stops_the_writing(server, client):
    letter = server.pool.engines[0].served.backend.token_to_id("A")
    assert letter is not None
    with client.messages.stream(model="tiny", messages=USER, max_tokens=900, extra_body={"temperature": 0}) as stream:
        next(iter(stream))

    engine = server.pool.engines[0]
    while engine.num_running:
        # the thread drops the text at its next step
        engine.served.token_names.text_of(0)
