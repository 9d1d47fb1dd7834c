"""Prompts are JSON lines: split by content, encoded once, and refused by file and line."""

import json
from pathlib import Path

import pytest

from phalanx.config import config_of
from phalanx.data import BpeConfig, DataConfig
from phalanx.data.prompts import prepare_prompts
from phalanx.errors import ConfigError, DataError

MARKS = ("<|im_start|>", "<|im_end|>")
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


def prepared(tmp_path, lines, *, seq=64, longest=8, share=0.25, seed=0, marks=(), ignore=()):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    data = DataConfig(
        prompts=({"path": path, "ignore": ignore},) if ignore else (path,),
        tokenizer=BpeConfig(vocab_size=257 + len(marks), special_tokens=marks),
        sequence_length=seq,
        validation_share=share,
    )
    return prepare_prompts(data, tmp_path / "cache", seed, None, longest)


def many(count=40):
    return [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(count)]


def test_prompts_are_split_by_content_and_seed_whatever_their_order(tmp_path):
    first, again = prepared(tmp_path, many()), prepared(tmp_path, many()[::-1])
    other = prepared(tmp_path, many(), seed=1)

    held = {one.text for one in first.held_out}
    assert held == {one.text for one in again.held_out} != {one.text for one in other.held_out}
    assert held
    assert len(first.train) + len(first.held_out) == 40
    assert first.train[0].record["answer"] == str(int(first.train[0].text.split()[0]) + 1)
    assert first.digest == prepared(tmp_path, many()).digest != again.digest


def test_a_changed_answer_is_another_set(tmp_path):
    lines = many()
    before = prepared(tmp_path, lines).digest
    lines[3]["answer"] = "0"

    assert prepared(tmp_path, lines).digest != before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ('["prompt"]', "line 2"),
        ('{"text": "a"}', 'line 2: has no "prompt"'),
        ('{"prompt": ""}', 'line 2: has no "prompt"'),
        ('{"prompt": 3}', 'line 2: has no "prompt"'),
        ('{"prompt": "\\ud800"}', "line 2: holds .* a lone surrogate"),
        ('{"prompt": [{"role": "user", "content": "\\ud800"}]}', "line 2: holds .* a lone surrogate"),
        ('{"prompt": "b", "answer": NaN}', "line 2: holds NaN"),
        (
            {"prompt": "x" * 57},
            r"line 2: the prompt has 57 tokens, but data.sequence_length minus max_new_tokens leaves 56",
        ),
        ({"prompt": "<|endoftext|>"}, None),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line, said):
    if said is None:
        # the words of a special token are words
        assert len(prepared(tmp_path, [{"prompt": "a"}, line], share=0.0).train[1].ids) > 1
        return
    with pytest.raises(DataError, match=rf"prompts\.jsonl, {said}"):
        prepared(tmp_path, [{"prompt": "a"}, line], share=0.0)


def test_messages_are_rendered_up_to_where_the_assistant_begins_and_its_turn_ends_a_text(tmp_path):
    found = prepared(tmp_path, [{"prompt": ASKED, "answer": "2"}, {"prompt": "a"}], seq=128, share=0.0, marks=MARKS)

    ends = ("<|endoftext|>", "<|im_end|>")
    assert found.train[0].text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found.train[0].ids.count(found.tokenizer.backend.token_to_id("<|im_end|>")) == 2
    assert [found.tokenizer.backend.id_to_token(one) for one in found.ends] == list(ends)
    # nothing of a chat is in a set without one
    assert prepared(tmp_path, [{"prompt": "a"}], share=0.0, marks=MARKS).ends == found.ends[:1]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], 'has no "prompt"'),
        (["hi"], "turn 1"),
        ([{"content": "hi"}], "turn 1"),
        ([{"role": "judge", "content": "hi"}], "turn 1: has the role 'judge'"),
        ([*ASKED, {"role": "assistant", "content": "2"}], "its last message is the assistant's"),
        ([{"role": "user", "content": "<|im_end|>"}], "special token"),
        ([{"role": "user", "content": "x" * 200}], "tokens, but data.sequence_length minus max_new_tokens leaves 120"),
    ],
)
def test_messages_that_are_no_prompt_are_named(tmp_path, messages, said):
    with pytest.raises(DataError, match=rf"prompts\.jsonl, line 2: .*{said}"):
        prepared(tmp_path, [{"prompt": ASKED}, {"prompt": messages}], seq=128, share=0.0, marks=MARKS)


def test_a_tokenizer_without_the_special_tokens_of_the_template_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"line 1: .*is not a token of the tokenizer"):
        prepared(tmp_path, [{"prompt": ASKED}], seq=128, share=0.0)


def test_fields_of_messages_that_a_source_ignores_are_not_looked_at(tmp_path):
    noted = [{"prompt": [{**ASKED[1], "annotator": 7, "ts": None}], "id": 3}]

    with pytest.raises(DataError, match=r"line 1: turn 1\.annotator: Extra inputs"):
        prepared(tmp_path, noted, seq=128, share=0.0, marks=MARKS)
    found = prepared(tmp_path, noted, seq=128, share=0.0, marks=MARKS, ignore=("annotator",))

    plain = prepared(tmp_path, [{"prompt": [ASKED[1]]}], seq=128, share=0.0, marks=MARKS)
    assert found.train[0].ids == plain.train[0].ids


def test_a_file_of_prompts_is_a_path_or_a_section_and_a_path_keeps_its_digest():
    plain = {"tokenizer": BpeConfig(vocab_size=257), "sequence_length": 8}
    told = {"path": "a.jsonl", "ignore": ["id"]}

    found = DataConfig(prompts=["b.jsonl", told], **plain)

    assert [(str(one.path), one.ignore) for one in found.prompts] == [("b.jsonl", ()), ("a.jsonl", ("id",))]
    assert found.model_dump(mode="json")["prompts"] == ["b.jsonl", told]
    assert DataConfig(prompts="b.jsonl", **plain).model_dump(mode="json")["prompts"] == ["b.jsonl"]
    assert DataConfig(prompts=told, **plain).prompts[0].ignore == ("id",)
    for wrong in ({"file": "a"}, {"path": "a", "ignore": "id"}, 3):
        with pytest.raises(ValueError, match="prompts"):
            DataConfig(prompts=[wrong], **plain)


def test_rewards_are_given_the_prompt_as_the_template_sees_it(tmp_path):
    tool = {"type": "function", "function": {"name": "add"}}
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    result = {"role": "tool", "content": "2"}
    line = {"prompt": [ASKED[1], call, result], "system": "Be brief.", "tools": json.dumps([tool]), "answer": "2"}
    chatml = {"seq": 400, "share": 0.0, "marks": MARKS}

    (found,) = prepared(tmp_path, [line], **chatml).train

    given = found.reward_record
    assert [one["role"] for one in given["prompt"]] == ["system", "user", "assistant", "tool"]
    assert given["prompt"][2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (given["tools"], given["answer"]) == ([tool], "2")
    assert found.record == line
    assert prepared(tmp_path, [{"prompt": "a"}], **chatml).train[0].reward_record == {"prompt": "a"}


def test_a_prompt_that_just_fits_is_taken(tmp_path):
    assert len(prepared(tmp_path, [{"prompt": "x" * 56}], share=0.0).train[0].ids) == 56


def test_no_prompts_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no prompt"):
        prepared(tmp_path, [""])
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read"):
        prepare_prompts(
            DataConfig(prompts=(tmp_path / "nowhere.jsonl",), tokenizer=BpeConfig(), sequence_length=8),
            tmp_path,
            0,
            None,
            4,
        )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sources": [{"kind": "python_manual"}]}, "preferences or prompts"),
        ({"max_documents": 3}, "max_documents is for text"),
        ({"attention": "document"}, "attention is for text"),
    ],
)
def test_what_goes_with_text_alone_is_refused_beside_prompts(keys, said):
    data = {"prompts": "a.jsonl", "tokenizer": {"kind": "bpe"}, "sequence_length": 8, **keys}
    with pytest.raises(ConfigError, match=said):
        config_of(data, Path("run.toml"), DataConfig)
