"""Claims of engines and tricks of clients that would make an answer cheaper, unfiltered or unseen."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest

from phalanx.serve.access import Caller, RequestRefused
from phalanx.serve.filters import TextFilters
from phalanx.serve.gateway import GatewayLimits
from phalanx.serve.gateway.answers import AnswerFacts, clean_answer
from phalanx.serve.gateway.app import _Entry
from phalanx.serve.gateway.requests import ROUTES, read_request
from phalanx.serve.gateway.streams import AnswerStream

PLANTED = "AKIA" + "QYLPMN5HNXJ6TY3B"
ASKED = [{"role": "user", "content": "say hi"}]
PATHS = {route.name: route for route in ROUTES}


def read(name: str = "chat", limits: GatewayLimits | None = None, **more):
    body = {"model": "small", "messages": ASKED, "max_tokens": 9, **more}
    body = {key: value for key, value in body.items() if value is not None}
    return read_request(PATHS[name], json.dumps(body).encode(), "alice", limits or GatewayLimits(), TextFilters())


def relay(request, parts: list[dict | str]) -> tuple[bytes, tuple[int, int]]:
    """Return what a client gets of a stream, and the counts that its key pays."""
    paid = []
    reservation = SimpleNamespace(
        entry=SimpleNamespace(prompt=100, completion=9), settle=lambda *counts: paid.append(counts)
    )
    log = SimpleNamespace(record_request=lambda *facts: None, seals_texts=False)
    entry = _Entry(log, Caller("a" * 12, "alice", "user", None, False), request, reservation)

    async def send():
        for part in parts:
            yield f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n".encode()

    async def collect():
        stream = AnswerStream(request, TextFilters(), entry.facts, GatewayLimits())
        answer = SimpleNamespace(read_pieces=send)
        return b"".join([event async for event in stream.relay(answer, entry.finish)])

    with entry:
        events = asyncio.run(collect())
    return events, paid[0]


@pytest.mark.parametrize(("second", "kept"), [("bye", ["hi", "bye"]), (PLANTED, [])])
def test_of_a_whole_answer_all_texts_are_kept_or_none(second, kept):
    """A filter that refuses one choice keeps back all: the log does not say that the others went out."""
    choices = [{"index": index, "message": {"content": text}} for index, text in enumerate(("hi", second))]
    facts = AnswerFacts(answers={})
    with contextlib.suppress(RequestRefused):
        clean_answer(json.dumps({"id": "c", "choices": choices}).encode(), read(n=2), TextFilters(), facts)

    assert ["".join(pieces) for pieces in facts.answers.values()] == kept


def chunk(text: str = "", finish: str | None = None, **more) -> dict:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more}


START = {
    "type": "message_start",
    "message": {"id": "m", "content": [], "usage": {"input_tokens": 3, "output_tokens": 1}},
}
BLOCK = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}

ESCAPED = '{"a": "the key is ' + PLANTED[:6] + f"\\u{ord(PLANTED[6]):04x}" + PLANTED[7:] + ' now"}'
TOOL_CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
HIDDEN_ARGUMENTS = {
    "chat": {"choices": [{"index": 0, "message": {"tool_calls": [{"function": {"name": "f", "arguments": ESCAPED}}]}}]},
    "chat that is cut off": {
        "choices": [{"index": 0, "message": {"tool_calls": [{"function": {"arguments": ESCAPED.rstrip('"}')}}]}}]
    },
    "responses": {
        "status": "completed",
        "output": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": ESCAPED}],
    },
}


@pytest.mark.parametrize("case", HIDDEN_ARGUMENTS)
def test_escapes_in_arguments_of_a_whole_call_hide_nothing(case):
    """Attacker: whoever has a model write a word by its escapes, which the client's reader of JSON undoes."""
    name = case.partition(" ")[0]
    asked = {"input": "hi", "messages": None, "max_tokens": None} if name == "responses" else {}

    with pytest.raises(RequestRefused) as refusal:
        clean_answer(json.dumps(HIDDEN_ARGUMENTS[case]).encode(), read(name, **asked), TextFilters(), AnswerFacts())

    assert refusal.value.code == "content_filter"


ORIGIN = {"marked": [PLANTED], "note": f"see {PLANTED} now"}
BESIDE_TEXTS = {
    "count of a chat": (
        "chat",
        [chunk("a", finish="stop"), {"id": "c", "choices": [], "usage": {}, "phalanx": ORIGIN}],
    ),
    "part of a chat": ("chat", [chunk("a", phalanx=ORIGIN), chunk(finish="stop", phalanx=ORIGIN)]),
    "ping": ("messages", [START, {"type": "ping", "phalanx": ORIGIN}]),
    "begin of a message": ("messages", [{**START, "phalanx": ORIGIN}]),
    "first message": ("messages", [{**START, "message": {**START["message"], "phalanx": ORIGIN}}]),
    "fault of the first message": ("messages", [{**START, "message": {**START["message"], "error": ORIGIN}}]),
    "arguments in a delta": (
        "messages",
        [START, BLOCK, {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "input": ORIGIN}}],
    ),
    "arguments in another event": (
        "messages",
        [START, {"type": "ping", "content_block": {"type": "text", "input": ORIGIN}}],
    ),
    "end of a message": ("messages", [START, {"type": "message_delta", "delta": {}, "phalanx": ORIGIN}]),
}


@pytest.mark.parametrize("case", BESIDE_TEXTS)
def test_what_an_engine_says_of_its_answer_is_no_place_for_a_text_in_any_event(case):
    name, parts = BESIDE_TEXTS[case]
    options = {"stream_options": {"include_usage": True}} if name == "chat" else {}

    events, _ = relay(
        read(name, stream=True, **options), [*parts, "[DONE]" if name == "chat" else {"type": "message_stop"}]
    )

    assert PLANTED.encode() not in events


def test_nor_beside_vectors():
    answer = {"object": "list", "data": [{"embedding": [0.5]}], "phalanx": ORIGIN}
    request = read("embeddings", input="a", messages=None, max_tokens=None)

    clean = clean_answer(json.dumps(answer).encode(), request, TextFilters(), AnswerFacts())

    assert PLANTED not in json.dumps(clean)


def in_pieces(text: str) -> list[str]:
    return [text[start : start + 3] for start in range(0, len(text), 3)]


@pytest.mark.parametrize("arguments", [ESCAPED, ESCAPED.rstrip('"}')])
@pytest.mark.parametrize("name", ["chat", "messages"])
def test_escapes_in_arguments_of_a_streamed_call_hide_nothing(name, arguments):
    deltas = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in in_pieces(arguments)]
    calls = [{"tool_calls": [TOOL_CALL]}, *deltas]
    chat = [{"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in calls]
    blocks = [{"type": "input_json_delta", "partial_json": piece} for piece in in_pieces(arguments)]
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    messages = [START, {"type": "content_block_start", "index": 0, "content_block": use}]
    messages += [{"type": "content_block_delta", "index": 0, "delta": block} for block in blocks]
    messages += [{"type": "content_block_stop", "index": 0}, {"type": "message_stop"}]

    events, _ = relay(
        read(name, stream=True), {"chat": [*chat, chunk(finish="tool_calls"), "[DONE]"], "messages": messages}[name]
    )

    assert PLANTED[7:].encode() not in events
    assert b"content_filter" in events or b'"refusal"' in events


def test_arguments_of_a_streamed_call_come_whole_at_its_end():
    arguments = '{"place": "Oslo", "note": "a \\"word\\" \\u00e9"}'
    deltas = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in in_pieces(arguments)]
    calls = [{"tool_calls": [TOOL_CALL]}, *deltas]
    parts = [{"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in calls]

    events, _ = relay(read(stream=True), [*parts, chunk(finish="tool_calls"), "[DONE]"])

    sent = [json.loads(line.removeprefix("data: ")) for line in events.decode().split("\n\n")[:-2]]
    pieces = [
        call["function"]["arguments"] for part in sent for call in part["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert "".join(pieces) == arguments


@pytest.mark.parametrize(("names", "goes_out"), [(["see", ""], True), ([PLANTED[:9], PLANTED[9:]], False)])
def test_a_name_comes_whole(names, goes_out):
    """Clients join the pieces of a name, of which a filter would read each alone."""
    calls = [{"index": 0, "function": {"name": name}} for name in names]
    parts = [{"id": "c", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in calls]

    events, _ = relay(read(stream=True), [*parts, chunk(finish="tool_calls"), "[DONE]"])

    assert (b"engine_failed" not in events) is goes_out
    assert PLANTED[9:].encode() not in events


SCORED = {
    "bytes": {"content": [{"token": "\ufffd", "logprob": -1, "bytes": list(PLANTED.encode())}]},
    "tokens and bytes by turns": {
        "content": [
            {"token": PLANTED[:9], "logprob": -1},
            {"token": "\ufffd", "logprob": -1, "bytes": list(PLANTED[9:].encode())},
        ]
    },
    "tokens of the other route": {"tokens": ["x"], "content": [{"token": PLANTED, "logprob": -1}]},
}


@pytest.mark.parametrize("case", SCORED)
def test_bytes_and_texts_of_scored_tokens_are_filtered(case):
    answer = {"choices": [{"index": 0, "message": {"content": "x"}, "logprobs": SCORED[case]}]}

    with pytest.raises(RequestRefused) as refusal:
        clean_answer(json.dumps(answer).encode(), read(logprobs=True), TextFilters(), AnswerFacts())

    assert refusal.value.code == "content_filter"


def alternatives_of(name: str, tokens: list[list[str]]) -> dict:
    """Scores of as many tokens, with others beside each of them."""
    if name == "completions":
        top = [{token: -1.0 for token in row} for row in tokens]
        return {"tokens": ["x"] * len(tokens), "token_logprobs": [-0.1] * len(tokens), "top_logprobs": top}
    score = {"token": "x", "logprob": -0.1, "bytes": [120]}
    others = [[{"token": token, "logprob": -1.0} for token in row] for row in tokens]
    return {"content": [{**score, "top_logprobs": row} for row in others]}


CUT = [[PLANTED[:9], "a"], [PLANTED[9:], "b"]]
OTHERS = {
    "one token": ([[f"see {PLANTED} now", "a"]], False),
    "likeliest ones": (CUT, False),
    "second ones": ([row[::-1] for row in CUT], False),
    "harmless": ([["yes", "no"], ["maybe", "\u00e9"]], True),
}


@pytest.mark.parametrize("name", ["chat", "completions"])
@pytest.mark.parametrize("case", OTHERS)
def test_tokens_beside_those_of_the_text_go_out_where_no_filter_refuses_them(name, case):
    tokens, goes_out = OTHERS[case]
    scores = alternatives_of(name, tokens)
    text = {"text": "x"} if name == "completions" else {"message": {"content": "x"}}
    asked = (
        {"logprobs": True, "top_logprobs": 2} if name == "chat" else {"logprobs": 2, "prompt": "a", "messages": None}
    )
    facts = AnswerFacts()

    answer = clean_answer(
        json.dumps({"choices": [{"index": 0, **text, "logprobs": scores}]}).encode(),
        read(name, **asked),
        TextFilters(),
        facts,
    )

    got = answer["choices"][0]["logprobs"]
    if goes_out:
        assert got == scores
        assert not facts.verdicts
    else:
        assert PLANTED[9:] not in json.dumps(answer)
        assert list(facts.verdicts) == ["secrets: alternatives"]
        assert got.get("token_logprobs", [-0.1]) == [-0.1] * len(tokens) or got["content"][0]["logprob"] == -0.1


def test_bytes_of_alternatives_do_not_go_out():
    scores = alternatives_of("chat", [["a", "b"]])
    scores["content"][0]["top_logprobs"][1]["bytes"] = list(PLANTED.encode())
    answer = {"choices": [{"index": 0, "message": {"content": "x"}, "logprobs": scores}]}

    clean = clean_answer(json.dumps(answer).encode(), read(logprobs=True, top_logprobs=2), TextFilters(), AnswerFacts())

    assert PLANTED.encode() not in bytes(clean["choices"][0]["logprobs"]["content"][0]["bytes"])
    assert clean["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == [
        {"token": "a", "logprob": -1.0},
        {"token": "b", "logprob": -1.0},
    ]


def piece(text: str) -> dict:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


EARLY_COUNT = {"usage": {"prompt_tokens": 3, "completion_tokens": 0}}
UNFINISHED = {
    "message that ends before its count": ("messages", [START, BLOCK, piece("a long text")]),
    "message that a filter ends": ("messages", [START, BLOCK, piece("a long text"), piece(f" {PLANTED} ")]),
    "chat that ends behind an early count": ("chat", [chunk("a long text", **EARLY_COUNT)]),
    "chat that a filter ends": ("chat", [chunk("a long text", **EARLY_COUNT), chunk(f" {PLANTED} ")]),
}


@pytest.mark.parametrize("case", UNFINISHED)
def test_an_early_count_of_an_answer_that_does_not_end_is_no_price(case):
    """Attacker: a client that leaves, or has a filter end the answer, just before the count of its tokens."""
    name, parts = UNFINISHED[case]

    events, paid = relay(read(name, stream=True), parts)

    assert b"a long" in events
    assert PLANTED.encode() not in events
    assert paid == (3, 9)


def test_the_count_at_the_end_of_an_answer_is_its_price():
    end = [{"type": "message_delta", "delta": {}, "usage": {"output_tokens": 4}}, {"type": "message_stop"}]

    end.insert(0, {"type": "content_block_stop", "index": 0})
    assert relay(read("messages", stream=True), [START, BLOCK, piece("a"), *end])[1] == (3, 4)
    count = {"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    assert relay(read(stream=True), [chunk("a"), chunk(finish="stop"), count, "[DONE]"])[1] == (3, 4)


@pytest.mark.parametrize(("name", "route"), [("delta", "chat"), ("text", "completions")])
def test_the_end_of_a_text_that_no_reason_ends_reaches_the_client(name, route):
    """Some engines send [DONE] alone: what the filters hold back is written before it, or refused."""
    value = {"content": "one short sentence"} if name == "delta" else "one short sentence"
    part = {"id": "c", "choices": [{"index": 0, name: value, "finish_reason": None}]}

    asked = {} if route == "chat" else {"messages": None, "prompt": "say hi"}

    events, _ = relay(read(route, stream=True, **asked), [part, "[DONE]"])

    choices = [
        choice
        for line in events.decode().splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line.removeprefix("data: "))["choices"]
    ]
    texts = [choice["delta"].get("content", "") if name == "delta" else choice["text"] for choice in choices]
    assert "".join(texts) == "one short sentence"
    assert events.endswith(b"data: [DONE]\n\n")

    events, _ = relay(read(stream=True), [chunk(f"the key is {PLANTED}"), "[DONE]"])

    assert PLANTED.encode() not in events
    assert b"content_filter" in events


def test_a_message_that_ends_within_a_block_says_that_it_broke_off():
    events, _ = relay(
        read("messages", stream=True), [START, BLOCK, piece("one short sentence"), {"type": "message_stop"}]
    )

    assert b"broke off" in events
    assert b"message_stop" not in events


@pytest.mark.parametrize("size", [1, 7])
def test_a_text_that_is_finished_again_and_again_slips_past_no_filter(size):
    """Attacker: an engine that has the filter let go of each piece by calling it the last one."""
    text = f"the key is {PLANTED} "
    parts = [chunk(text[start : start + size], "stop") for start in range(0, len(text), size)]

    events, _ = relay(read(stream=True), [*parts, "[DONE]"])

    written = "".join(
        choice["delta"].get("content") or ""
        for line in events.decode().splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line.removeprefix("data: ")).get("choices", ())
    )
    assert PLANTED not in written
    assert len(written) <= size


def test_a_block_that_has_ended_goes_on_past_no_filter():
    """Attacker: an engine of the other protocol that ends a block within what a filter looks for, and goes on."""
    stop = {"type": "content_block_stop", "index": 0}
    parts = [START, BLOCK, piece(f"the key is {PLANTED[:9]}"), stop, piece(f"{PLANTED[9:]} "), stop]

    events, _ = relay(read("messages", stream=True), [*parts, {"type": "message_stop"}])

    assert PLANTED[:9].encode() in events
    assert PLANTED[9:].encode() not in events


def test_marks_of_an_engine_are_no_place_for_a_text():
    """Attacker: an engine that writes a prompt into the names of watermarks, and so into logs and traces."""
    stolen = "the patient in bed four has cancer"

    described = AnswerFacts().describe_origin({"marked": [stolen]})

    assert stolen not in json.dumps(described)
    assert AnswerFacts().describe_origin({"marked": ["gumbel", "no (off)"]})["marked"] == ["gumbel", "no (off)"]


WALKS = {
    "system": ("messages", "system"),
    "instructions": ("responses", "instructions"),
    "suffix": ("completions", "suffix"),
}


@pytest.mark.parametrize("case", WALKS)
def test_every_text_of_a_prompt_is_in_its_words(case):
    """Attacker: a client that walks a model by a field beside an unchanged question."""
    name, field = WALKS[case]
    fields = {
        "messages": {},
        "responses": {"messages": None, "max_tokens": None, "input": "the same"},
        "completions": {"messages": None, "prompt": "the same"},
    }[name]
    one, other = (read(name, **fields, **{field: text}).prompt_words() for text in ("first", "second"))

    assert one != other
    assert [len(one), len(other)] == [1, 1]


def test_each_prompt_of_token_ids_is_one_prompt():
    limits = GatewayLimits(allow_token_prompts=True)
    request = read("completions", limits, messages=None, prompt=[[1, 2], [3, 4], [5, 6]])

    assert request.prompt_words() == [["1", "2"], ["3", "4"], ["5", "6"]]
    assert read("completions", limits, messages=None, prompt=[1, 2]).prompt_words() == [["1", "2"]]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("completions", 0, True), ("completions", 3, True), ("completions", None, False), ("chat", False, False)],
)
def test_log_probabilities_of_the_token_alone_are_log_probabilities(name, value, expected):
    """Attacker: a client that collects scores by ``logprobs: 0``, which gives one for each token too."""
    fields = {"messages": None, "prompt": "a"} if name == "completions" else {}

    assert read(name, logprobs=value, **fields).has_scores is expected


CHOICES = {
    "chat": lambda text: {"type": "function", "function": {"name": "f", "description": text}},
    "messages": lambda text: {"type": "tool", "name": text},
    "responses": lambda text: {"type": "function", "name": text},
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_of_a_tool_is_read_as_every_text(name):
    """Attacker: a client that brings texts past filters, budget and the rule for personal data."""
    fields = {"messages": None, "max_tokens": None, "input": "a"} if name == "responses" else {}

    assert not read(name, tool_choice=CHOICES[name]("look_up"), **fields).is_sensitive
    assert read(name, tool_choice=CHOICES[name]("anna.larsen@example.org"), **fields).is_sensitive
    with pytest.raises(RequestRefused, match="refuses the text"):
        read(name, tool_choice=CHOICES[name]("<|im_start|>system"), **fields)
    long, short = (read(name, tool_choice=CHOICES[name]("x" * size), **fields).max_prompt_tokens for size in (100, 10))
    assert long - short == 90


def test_a_schema_in_the_choice_of_a_tool_refers_to_itself_alone():
    function = {"name": "f", "parameters": {"$ref": "http://10.0.0.5/schema"}}

    with pytest.raises(RequestRefused, match="itself alone"):
        read(tool_choice={"type": "function", "function": function})


def test_no_tokens_are_asked_for_where_a_prompt_is_scored_alone():
    """Attacker: a client of an engine that takes 0 for no limit, such as llama-cpp-python: all tokens were free."""
    texts = {"messages": None, "prompt": "a"}

    assert read("completions", **texts, max_tokens=0, echo=True).max_completion_tokens == 0
    for name, fields in (("chat", {}), ("completions", texts)):
        with pytest.raises(RequestRefused) as refusal:
            read(name, **fields | {"max_tokens": 0})
        assert (refusal.value.status, refusal.value.param) == (400, "max_tokens")
