"""Texts of one batch are those of transformers, one by one; owners, seeds, adapters and faults stay apart."""

import asyncio
import dataclasses
import itertools
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from late_imports import LateModule
from phalanx.data.chat import ChatMessage
from phalanx.errors import ModelError
from phalanx.serve import TextModel
from phalanx.serve.engine import (
    BadRequestError,
    BatchingEngine,
    ChoiceEnd,
    EngineBusyError,
    EngineSettings,
    GenerationRequest,
    Grammar,
    HostedModel,
    PromptRead,
    SamplingSettings,
    TextPiece,
    Tool,
    batcher,
    collect_events,
    text_states,
)
from phalanx.serve.engine.chooser import check_finite
from phalanx.serve.engine.int8 import Int8Linear
from phalanx.serve.engine.packed import pack_model
from phalanx.serve.engine.row_cache import CHUNK, PrefixStore, RowCache
from tiny_served import END, END_TURN, UNMARKED, serve_model, write_model

peft = LateModule("peft")

PROMPTS = ["the", "in the end", "a" * 70, "é and é", "x", "the " * 60, "and in", "?!", "b" * 130, "end the day and"]
WIDE = "start: " + " | ".join(f'"x" r{number}' for number in range(1500)) + "\n"
WIDE += "\n".join(f'r{number}: "x{number}"' for number in range(1500))
"""Alternatives that all begin alike: more than a parser may hold at one place."""
FACTORS = {"type": "object", "properties": {"a": {"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]}}}
"""Small numbers whose automaton has a state for each remainder of their product."""
GREEDY = SamplingSettings(temperature=0.0)
LONG = tuple(number % 50 + 1 for number in range(300))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(directory):
    return serve_model(directory)


@pytest.fixture(scope="module")
def engine(served):
    engine = BatchingEngine(served, EngineSettings(), UNMARKED)
    yield engine
    engine.close()


def ask(text, **changes):
    settings = {"sampling": GREEDY, "max_tokens": 24, "owner": "alice"} | changes
    return GenerationRequest(model="tiny", text=text, **settings)


async def answer(engine, request, adapter=""):
    prompt = engine.served.encode_prompt(request)
    return await collect_events(await engine.open_events(request, prompt, adapter))


def answers(engine, requests):
    async def run():
        return await asyncio.gather(*(answer(engine, request) for request in requests))

    return asyncio.run(run())


def text_of(events, choice=0):
    return "".join(event.text for event in events if isinstance(event, TextPiece) and event.choice == choice)


def scores_of(events):
    return [score for event in events if isinstance(event, TextPiece) for score in event.scores]


def greedy_of_transformers(directory, served, prompt, max_tokens=24):
    """The text, with the tokens up to and with its end."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([list(prompt)])
    ends = sorted(served.text_ends)
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
    tokens = output[0, ids.shape[1] :].tolist()
    return served.backend.decode(tokens, skip_special_tokens=True), len(tokens)


def test_greedy_texts_of_a_batch_are_those_of_transformers(directory, served, engine):
    requests = [ask(prompt, owner=f"owner {number}") for number, prompt in enumerate(PROMPTS)]
    # each twice, so that a batch has rows of every length, that begin at different steps
    results = answers(engine, [*requests, *requests])

    for request, events in zip([*requests, *requests], results, strict=True):
        expected = greedy_of_transformers(directory, served, served.encode_prompt(request))
        assert (text_of(events), events[-1].num_tokens) == expected


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3", "mistral", "gpt_neox", "olmo2"])
def test_other_families_write_as_transformers_does(tmp_path, model_type):
    layout = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 272}
    config = {"model_type": model_type, **layout, "max_position_embeddings": 512, "initializer_range": 0.3}
    changes = {"head_dim": 8, "sliding_window": 48} if model_type in ("qwen3", "mistral") else {}
    directory = write_model(tmp_path, **(config | changes))
    served = serve_model(directory)
    engine = BatchingEngine(served, EngineSettings(), UNMARKED)
    try:
        requests = [ask(prompt) for prompt in PROMPTS]
        for request, events in zip(requests, answers(engine, requests), strict=True):
            expected = greedy_of_transformers(directory, served, served.encode_prompt(request))
            assert (text_of(events), events[-1].num_tokens) == expected
    finally:
        engine.close()


def test_a_reproducible_engine_writes_the_same_bits_in_any_company(served):
    engine = BatchingEngine(served, EngineSettings(reproducible=True), UNMARKED)
    drawn = SamplingSettings(temperature=1.0, seed=5)
    request = ask("the " * 80, logprobs=2, sampling=drawn)
    try:
        (alone,) = answers(engine, [request])
        others = [ask(prompt, sampling=SamplingSettings(seed=n), owner=f"{n}") for n, prompt in enumerate(PROMPTS)]
        company = answers(engine, [*others[:5], request, *others[5:]])[5]
    finally:
        engine.close()

    # floats are compared bit for bit; the second time the prompt was in the owner's cache
    assert scores_of(company) == scores_of(alone)
    assert (alone[0].reused_tokens, company[0].reused_tokens) == (0, 64)


def test_a_seed_decides_a_text_and_choices_differ(engine):
    drawn = SamplingSettings(temperature=1.0, seed=3)
    first, again, other = answers(
        engine, [ask("in", sampling=drawn, n=3), ask("in", sampling=drawn, n=3), ask("in", sampling=SamplingSettings())]
    )

    texts = [text_of(first, choice) for choice in range(3)]
    assert texts == [text_of(again, choice) for choice in range(3)]
    assert len({*texts, text_of(other)}) == 4
    assert sum(isinstance(event, ChoiceEnd) for event in first) == 3


def test_a_stop_sequence_may_reach_over_tokens_and_is_not_in_the_text(engine):
    (whole,) = answers(engine, [ask("the", max_tokens=40)])
    text = text_of(whole)
    stop = text[5:8]

    (cut,) = answers(engine, [ask("the", max_tokens=40, stop=("zzzz", stop), logprobs=0)])

    assert text_of(cut) == text[: text.index(stop)]
    assert (cut[-1].finish, cut[-1].stop) == ("stop_sequence", stop)
    # the scores are of those tokens that lie before the stop sequence
    tokens = [score.token for score in scores_of(cut)]
    assert text_of(cut).startswith(engine.served.backend.decode(tokens).rstrip("\ufffd"))
    assert len(tokens) < cut[-1].num_tokens


def test_the_end_of_text_ends_it(served, engine):
    end = served.backend.token_to_id(END)

    (events,) = answers(engine, [ask("the", sampling=SamplingSettings(temperature=0.0, logit_bias={end: 100.0}))])

    assert [type(event) for event in events] == [PromptRead, ChoiceEnd]
    assert (events[-1].finish, events[-1].num_tokens) == ("stop", 1)


def test_echoed_scores_are_those_of_the_model(directory, served, engine):
    (events,) = answers(engine, [ask("and in the " * 20, echo=True, logprobs=1, max_tokens=0)])

    prompt = served.encode_prompt(ask("and in the " * 20))
    with torch.no_grad():
        logprobs = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    scores = events[0].scores
    assert scores[0] is None
    assert [score.token for score in scores[1:]] == list(prompt[1:])
    expected = [float(logprobs[place, token]) for place, token in enumerate(prompt[1:])]
    assert [score.logprob for score in scores[1:]] == pytest.approx(expected, abs=1e-4)
    assert all(score.top[0][1] >= score.logprob for score in scores[1:])


def test_the_echo_of_one_token_has_its_place_among_the_scores(engine):
    (events,) = answers(engine, [ask("x", echo=True, logprobs=1, max_tokens=1)])

    assert events[0].scores == (None,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 1024}, "more than the window"),
        ({"n": 8, "max_tokens": 900}, "room for"),
        ({"grammar": Grammar(kind="regex", source="(")}, "grammar is refused"),
        ({"grammar": Grammar(kind="json_schema", source='{"type": "nothing"}')}, "grammar is refused"),
        ({"grammar": Grammar(kind="json_schema", source='{"x-guidance": {"lenient": true}}')}, "x-guidance"),
        ({"grammar": Grammar(kind="json_schema", source=json.dumps({"enum": ["a"] * 3000}))}, "2048 nodes"),
        ({"grammar": Grammar(kind="json_schema", source='{"type": "integer", "multipleOf": 999999937}')}, "multipleOf"),
        ({"grammar": Grammar(kind="json_schema", source=json.dumps(FACTORS))}, "multipleOf"),
        ({"grammar": Grammar(kind="json_schema", source='{"type": "number", "multipleOf": 1e999}')}, "multipleOf"),
        ({"grammar": Grammar(kind="lark", source=WIDE)}, "the grammar"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_engine_goes_on(served, changes, message):
    engine = BatchingEngine(served, EngineSettings(max_cache_tokens=4096), UNMARKED)
    try:
        with pytest.raises(BadRequestError, match=message):
            answers(engine, [ask("the", **changes)])
        assert text_of(answers(engine, [ask("the")])[0])
    finally:
        engine.close()


def test_a_full_queue_refuses_and_who_leaves_makes_room(served):
    engine = BatchingEngine(served, EngineSettings(max_rows=1, max_waiting=1), UNMARKED)

    async def run():
        requests = [ask("in", max_tokens=900, sampling=SamplingSettings(temperature=0.0, logit_bias={65: 100.0}))] * 3
        prompt = served.encode_prompt(requests[0])
        running = await engine.open_events(requests[0], prompt, "")
        await anext(running)
        waiting = await engine.open_events(requests[1], prompt, "")
        assert engine.num_waiting == 1
        with pytest.raises(EngineBusyError, match="wait already"):
            await engine.open_events(requests[2], prompt, "")
        await running.aclose()
        assert isinstance(await anext(waiting), PromptRead)
        assert engine.num_running == 1

    try:
        asyncio.run(run())
    finally:
        engine.close()


def test_who_leaves_the_queue_makes_room_in_it(served):
    """Attacker: a client that asks and leaves again while all rows are taken."""
    engine = BatchingEngine(served, EngineSettings(max_rows=1, max_waiting=2), UNMARKED)

    async def run():
        request = ask("in", max_tokens=900, sampling=SamplingSettings(temperature=0.0, logit_bias={65: 100.0}))
        prompt = served.encode_prompt(request)
        running = await engine.open_events(request, prompt, "")
        await anext(running)
        first = await engine.open_events(request, prompt, "")
        await (await engine.open_events(request, prompt, "")).aclose()
        second = await engine.open_events(request, prompt, "")
        await running.aclose()
        assert isinstance(await anext(first), PromptRead)
        await first.aclose()
        assert isinstance(await anext(second), PromptRead)

    try:
        asyncio.run(run())
    finally:
        engine.close()


def test_an_engine_that_ends_tells_those_who_wait(served):
    engine = BatchingEngine(served, EngineSettings(), UNMARKED)

    async def run():
        request = ask("in", max_tokens=900, sampling=SamplingSettings(temperature=0.0, logit_bias={65: 100.0}))
        stream = await engine.open_events(request, served.encode_prompt(request), "")
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineBusyError):
            await collect_events(stream)
        with pytest.raises(EngineBusyError, match="about to end"):
            await answer(engine, request)

    asyncio.run(run())


@pytest.mark.parametrize("is_embedding", [False, True])
def test_a_fault_that_nobody_foresaw_ends_the_texts_that_are_written_and_no_others(engine, monkeypatch, is_embedding):
    def fail(*_parts):
        raise AttributeError("of a library, with a client's text")

    def work():
        request = ask("the")
        prompt = tuple(engine.served.encode_prompt(request))
        return asyncio.run(engine.embed_texts([prompt], "") if is_embedding else answer(engine, request))

    with monkeypatch.context() as patch:
        patch.setattr(*((text_states, "run_states") if is_embedding else (batcher, "choose_tokens")), fail)
        with pytest.raises(ModelError, match="cannot go on: AttributeError at") as fault:
            work()

    assert "client" not in str(fault.value)
    assert work()


def test_prefixes_are_reused_inside_one_owner_alone(engine):
    request = ask("and the " * 50, owner="carol")

    first, again, other = (
        answers(engine, [ask])[0] for ask in (request, request, request.model_copy(update={"owner": "dave"}))
    )

    assert [events[0].reused_tokens for events in (first, again, other)] == [0, 128, 0]
    assert text_of(first) == text_of(again) == text_of(other)


@pytest.mark.parametrize(
    ("changes", "reused"),
    [({}, 128), ({"cache_salt": "two"}, 0), ({"cache_salt": ""}, 0), ({"reuses_prompt": False}, 0)],
)
def test_prefixes_are_reused_inside_one_salt(engine, changes, reused):
    """Attacker: a client of a gateway, whose key is one owner for the engine, that times prompts of other clients."""
    request = ask("and the " * 50, owner=f"gateway {changes}", cache_salt="one")
    answers(engine, [request])

    (events,) = answers(engine, [request.model_copy(update=changes)])

    assert events[0].reused_tokens == reused


def test_a_prompt_that_is_not_to_be_reused_is_not_stored(engine):
    request = ask("and the " * 50, owner="frank", reuses_prompt=False)

    (_, events) = (answers(engine, [ask])[0] for ask in (request, request.model_copy(update={"reuses_prompt": True})))

    assert events[0].reused_tokens == 0


def test_a_chat_goes_on_from_what_was_written(served, engine):
    (first,) = answers(engine, [ask("the day " * 20, owner="erin", max_tokens=60)])
    longer = "the day " * 20 + text_of(first)

    (second,) = answers(engine, [ask(longer, owner="erin")])

    assert second[0].reused_tokens >= CHUNK


def make_cache(length):
    cache = RowCache(1)
    cache.reserve_room(length)
    cache.write_layer(0, 0, torch.ones(1, length, 2), torch.ones(1, length, 2))
    cache.length = length
    return cache


PLAIN = ("", "")


def test_an_owner_evicts_its_own_prefixes_alone():
    store = PrefixStore(max_tokens=2 * CHUNK)
    texts = [[number] * CHUNK for number in range(4)]
    store.put_prefix("alice", PLAIN, texts[0], make_cache(CHUNK))
    for text in texts:
        store.put_prefix("mallory", PLAIN, text, make_cache(CHUNK))

    held = {
        owner: [store.find_prefix(owner, PLAIN, [*text, 9]) is not None for text in texts]
        for owner in ("alice", "mallory", "bob")
    }

    assert held == {
        "alice": [True, False, False, False],
        "mallory": [False, False, True, True],
        "bob": [False] * 4,
    }
    assert store.find_prefix("alice", ("another adapter", ""), [*texts[0], 9]) is None


def test_beginnings_of_all_owners_have_no_more_room_than_texts(served):
    """Attacker: nobody; each owner's honest chats fill a room, and the machine's memory with a few hundred of them."""
    engine = BatchingEngine(served, EngineSettings(max_cache_tokens=256, max_owner_prefix_tokens=256), UNMARKED)
    requests = [ask("and the " * 50, owner=owner, max_tokens=1) for owner in ("alice", "bob", "carol") * 2]
    try:
        reused = [answers(engine, [request])[0][0].reused_tokens for request in requests]
    finally:
        engine.close()

    assert reused[:3] == [0, 0, 0]
    assert [tokens > 0 for tokens in reused[3:]] == [True, True, False]


def test_a_model_that_is_warm_prepares_nothing_at_a_request(directory, monkeypatch):
    served = serve_model(directory)
    served.warm_up()
    monkeypatch.setattr("phalanx.serve.engine.hosted_model.find_tool_format", None)
    monkeypatch.setattr("llguidance.hf.from_tokenizer", None)
    monkeypatch.setattr(served.text_model, "end_of_turn", None)
    engine = BatchingEngine(served, EngineSettings(), UNMARKED)
    message = ChatMessage(role="user", content="the")
    request = ask(None, messages=(message,), grammar=Grammar(kind="json_object"), max_tokens=4)
    try:
        (events,) = answers(engine, [request])
    finally:
        engine.close()

    assert isinstance(events[-1], ChoiceEnd)
    assert served.tool_format is not None


def test_an_idle_owner_gives_its_place_up_and_a_busy_one_does_not():
    now = 0.0
    store = PrefixStore(max_tokens=CHUNK, max_owners=20, read_clock=lambda: now)
    text = [1] * CHUNK
    for number in range(30):
        store.put_prefix(str(number), PLAIN, text, make_cache(CHUNK))
    has_place = [store.find_prefix(str(number), PLAIN, [*text, 2]) is not None for number in range(30)]
    now = 601.0
    store.put_prefix("late", PLAIN, text, make_cache(CHUNK))

    assert has_place == [True] * 20 + [False] * 10
    assert store.find_prefix("late", PLAIN, [*text, 2]) is not None
    assert store.find_prefix("0", PLAIN, [*text, 2]) is None


def test_a_schema_holds_and_its_end_ends_the_text(engine):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    grammar = Grammar(kind="json_schema", source=json.dumps(schema))
    drawn = [SamplingSettings(temperature=1.0, seed=seed) for seed in range(6)]

    results = answers(engine, [ask("x", grammar=grammar, sampling=rule, max_tokens=200) for rule in drawn])

    values = [json.loads(text_of(events)) for events in results]
    assert all(set(value) == {"name", "age"} and value["age"] <= 99 for value in values)
    assert {events[-1].finish for events in results} == {"stop"}


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (Grammar(kind="regex", source="(yes|no)"), {"yes", "no"}),
        (Grammar(kind="lark", source='start: "a" | "b"'), {"a", "b"}),
        (Grammar(kind="json_schema", source='{"enum": ["é", "b"]}'), {'"é"', '"b"'}),
    ],
)
def test_other_grammars_hold(engine, grammar, texts):
    assert text_of(answers(engine, [ask("x", grammar=grammar)])[0]) in texts


def test_a_chat_ends_with_its_turn_and_a_completion_goes_on(served, engine):
    sampling = SamplingSettings(temperature=0.0, logit_bias={served.backend.token_to_id(END_TURN): 100.0})
    chat = ask(None, messages=(ChatMessage(role="user", content="x"),), sampling=sampling)

    (of_chat, of_text) = answers(engine, [chat, ask("x", sampling=sampling)])

    assert (of_chat[-1].finish, of_chat[-1].num_tokens) == ("stop", 1)
    assert (of_text[-1].finish, of_text[-1].num_tokens) == ("length", 24)


def test_a_completion_under_a_grammar_ends_with_whatever_the_grammar_takes_for_its_end(served, engine):
    turn_end = served.backend.token_to_id(END_TURN)
    assert turn_end not in served.text_ends
    sampling = SamplingSettings(temperature=0.0, logit_bias={turn_end: 100.0})
    grammar = Grammar(kind="regex", source="a{1,9}")

    (events,) = answers(engine, [ask("x", grammar=grammar, sampling=sampling, logprobs=0)])

    assert (text_of(events), events[-1].finish) == ("a", "stop")
    assert turn_end not in [score.token for score in scores_of(events)]


def test_a_required_call_is_one_of_the_templates_form(served, engine):
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tools = (Tool(name="add", parameters=parameters), Tool(name="drop", parameters=parameters))
    tool_format = served.tool_format

    (events,) = answers(engine, [ask("x", grammar=tool_format.grammar_of(tools), max_tokens=200)])

    assert (tool_format.before, tool_format.after) == ("<tool_call>", "</tool_call>")
    text = text_of(events)
    call = tool_format.read_call(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call.name in ("add", "drop")
    assert call.arguments["n"] <= 9


@pytest.fixture(scope="module")
def adapters(directory, tmp_path_factory):
    """Two LoRA adapters with weights that change texts."""
    directories = {}
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(directory), config)
        directories[name] = tmp_path_factory.mktemp("adapters") / name
        model.save_pretrained(directories[name])
    return directories


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_and_their_base_share_a_batch(directory, adapters):
    served = serve_model(directory, adapters=adapters)
    engine = BatchingEngine(served, EngineSettings(), UNMARKED)

    async def run():
        names = ["", "first", "second", "", "second", "first"]
        requests = [ask(prompt) for prompt in PROMPTS[: len(names)]]
        return names, requests, await asyncio.gather(*map(answer, [engine] * len(names), requests, names))

    try:
        names, requests, results = asyncio.run(run())
    finally:
        engine.close()
    for name, request, events in zip(names, requests, results, strict=True):
        model = AutoModelForCausalLM.from_pretrained(directory)
        if name:
            model = peft.PeftModel.from_pretrained(model, adapters[name]).merge_and_unload()
        ids = torch.tensor([served.encode_prompt(request)])
        output = model.generate(
            ids, max_new_tokens=24, do_sample=False, eos_token_id=sorted(served.text_ends), pad_token_id=0
        )
        expected = served.backend.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
        assert text_of(events) == expected
    assert len({card.digest for card in served.cards}) == 3
    assert [card.base for card in served.cards] == [None, "tiny", "tiny"]


def test_damaged_weights_fail_the_request_and_not_the_thread(directory, tmp_path):
    served = serve_model(directory)
    engine = BatchingEngine(served, EngineSettings(), UNMARKED)
    # the head's own weights are packed; a number of the norm before it reaches all logits
    weight = served.module.model.norm.weight
    whole = weight.data.clone()
    try:
        weight.data[7] = math.nan
        with pytest.raises(ModelError, match="no finite number"):
            answers(engine, [ask("the")])
        weight.data.copy_(whole)
        assert text_of(answers(engine, [ask("the")])[0])
    finally:
        engine.close()


def test_embeddings_are_means_of_last_states_of_length_one(directory, served, engine):
    texts = [(1, 2, 3), (7,)]

    vectors = asyncio.run(engine.embed_texts(texts, ""))

    model = AutoModelForCausalLM.from_pretrained(directory)
    for text, vector in zip(texts, vectors, strict=True):
        with torch.no_grad():
            mean = model.model(torch.tensor([text])).last_hidden_state[0].mean(dim=0)
        assert vector == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)


def record_steps(monkeypatch) -> list[tuple[str, int]]:
    """Return a list that fills with the steps of a decode thread: their kind and number of tokens."""
    steps = []

    def record(module, kind, original):
        def run(model, ids, *rest):
            steps.append((kind, ids.shape[1]))
            return original(model, ids, *rest)

        monkeypatch.setattr(module, kind, run)

    record(text_states, "run_states", text_states.run_states)
    record(batcher, "run_step", batcher.run_step)
    return steps


@pytest.mark.parametrize("texts", [[(1, 2, 3)] * 64, [LONG] * 2], ids=["many", "long"])
def test_embeddings_and_texts_take_turns(served, monkeypatch, texts):
    """Attacker: a client whose 64 long texts for embeddings hold up the streams of all others."""
    steps = record_steps(monkeypatch)
    engine = BatchingEngine(served, EngineSettings(max_step_tokens=CHUNK), UNMARKED)

    async def run():
        embedding = asyncio.create_task(engine.embed_texts(texts, ""))
        await asyncio.sleep(0)
        await answer(engine, ask("the"))
        return await embedding

    try:
        vectors = asyncio.run(run())
    finally:
        engine.close()

    kinds = [kind for kind, _ in steps]
    while_writing = kinds[kinds.index("run_step") : len(kinds) - kinds[::-1].index("run_step")]
    pairs = itertools.pairwise(while_writing)
    assert while_writing.count("run_step") == 24
    assert ("run_states", "run_states") not in pairs
    assert max(count for kind, count in steps if kind == "run_states") <= CHUNK
    assert len(vectors) == len(texts)


def test_requests_for_embeddings_take_turns(engine):
    """Attacker: a client whose many texts keep those of another one waiting."""
    order = []

    async def embed(name, texts):
        vectors = await engine.embed_texts(texts, "")
        order.append(name)
        return vectors

    async def run():
        return await asyncio.gather(embed("many", [(1, 2, 3)] * 64), embed("one", [(7, 8)]))

    many, one = asyncio.run(run())

    assert order == ["one", "many"]
    assert [len(many), len(one)] == [64, 1]
    assert many[0] == many[63] != one[0]


def test_embeddings_that_nobody_waits_for_are_not_computed(served, monkeypatch):
    steps = record_steps(monkeypatch)
    engine = BatchingEngine(served, EngineSettings(max_step_tokens=CHUNK), UNMARKED)

    async def run():
        embedding = asyncio.create_task(engine.embed_texts([LONG] * 64, ""))
        while not steps:
            await asyncio.sleep(0)
        embedding.cancel()
        return await engine.embed_texts([(7, 8)], "")

    try:
        assert len(asyncio.run(run())) == 1
    finally:
        engine.close()
    assert len(steps) < 64


def test_a_long_text_is_embedded_in_pieces_as_in_one(directory, served):
    text = LONG
    engine = BatchingEngine(served, EngineSettings(max_step_tokens=CHUNK), UNMARKED)
    try:
        (vector,) = asyncio.run(engine.embed_texts([text], ""))
    finally:
        engine.close()

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(directory)
        mean = model.model(torch.tensor([text])).last_hidden_state[0].mean(dim=0)
    assert vector == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)


def test_penalties_make_written_tokens_less_likely(engine):
    plain, punished = answers(
        engine,
        [
            ask("the", sampling=SamplingSettings(temperature=0.0), logprobs=0, max_tokens=40),
            ask(
                "the",
                sampling=SamplingSettings(
                    temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=5.0
                ),
                logprobs=0,
                max_tokens=40,
            ),
        ],
    )

    assert len({score.token for score in scores_of(punished)}) > len({score.token for score in scores_of(plain)})


def test_events_say_how_many_tokens_there_are(engine):
    (events,) = answers(engine, [ask("the", max_tokens=7)])

    assert dataclasses.astuple(events[-1])[:3] == (0, "length", 7)
    assert events[0].num_tokens == 1


def test_integer_weights_write_the_same_bits_in_any_company(directory):
    served = HostedModel("tiny", TextModel(directory), 0, weights="int8")
    engine = BatchingEngine(served, EngineSettings(), UNMARKED)
    request = ask("the end", logprobs=1)
    others = [ask(prompt, owner="other") for prompt in PROMPTS]
    try:
        (alone,) = answers(engine, [request])
        (company, *_) = answers(engine, [request, *others])
    finally:
        engine.close()

    assert scores_of(company) == scores_of(alone)
    assert served.cards[0].digest != serve_model(directory).cards[0].digest


def test_integer_sums_are_those_of_float_numbers_within_rounding():
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 64, generator=generator), torch.randn(24, generator=generator)
    inputs = torch.randn(3, 5, 64, generator=generator)
    inputs[0, 0] = 0.0

    output = Int8Linear(weight, bias)(inputs)

    expected = torch.nn.functional.linear(inputs, weight, bias)
    assert output.shape == expected.shape
    assert torch.equal(output[0, 0], bias)
    assert float((output - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("columns", [64, 1040, 1041, 3000])
@pytest.mark.parametrize("is_packed", [False, True])
def test_integer_sums_are_the_same_bits_by_float_products(columns, is_packed):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, columns, generator=generator), torch.randn(24, generator=generator)
    # the largest sums of all: every product is 127 * 127
    weight[0], inputs = 1.0, torch.randn(3, 5, columns, generator=generator)
    inputs[0] = 1.0
    by_floats = torch.nn.Sequential(Int8Linear(weight, bias, in_floats=True))
    if is_packed:
        assert pack_model(by_floats) == math.ceil(columns / 1040)

    assert torch.equal(by_floats(inputs), Int8Linear(weight, bias)(inputs))


def test_a_processor_without_integer_products_writes_the_same_texts(directory, monkeypatch, caplog):
    scores = []
    for is_fast in (True, False):
        monkeypatch.setattr("phalanx.serve.engine.int8.has_fast_integers", lambda is_fast=is_fast: is_fast)
        engine = BatchingEngine(
            HostedModel("tiny", TextModel(directory), 0, weights="int8"), EngineSettings(), UNMARKED
        )
        try:
            (events,) = answers(engine, [ask("the end", logprobs=1)])
        finally:
            engine.close()
        scores.append(scores_of(events))
        assert ("no fast products" in caplog.text) == (not is_fast)

    assert scores[0] == scores[1]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_integer_weights_take_no_adapter(directory, adapters):
    with pytest.raises(ModelError, match="float weights alone"):
        HostedModel("tiny", TextModel(directory), 0, adapters, "int8")


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_one_logit_that_is_no_finite_number_ends_a_step(number):
    logits = torch.zeros(3, 5)
    logits[1, 4] = number

    with pytest.raises(ModelError, match="no finite number"):
        check_finite(logits)
    check_finite(logits[:1])
    check_finite(logits[:0])
