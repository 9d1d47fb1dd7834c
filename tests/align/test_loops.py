"""Revision and choice: rows that are the same wherever the process was killed, and choices that no order decides."""

import json
import math

import pytest

from align.fake_writer import BiasedJudge, FakeWriter, noise
from phalanx.align import ModelJudge, PairChoice, ResumableRows, Revision, read_prompts
from phalanx.align.choice import by_principles, by_worth, chosen_figures
from phalanx.align.principles import Constitution
from phalanx.align.revision import revised_figures
from phalanx.data.chat import parse_conversation
from phalanx.data.preferences.preference import parse_preference
from phalanx.errors import ConfigError, DataError, ModelError

PRINCIPLES = {
    "principle": [
        {"name": "first", "critique": "C1", "revise": "R1", "choose": "Q1"},
        {"name": "second", "critique": "C2", "revise": "R2", "choose": "Q2"},
    ]
}
CONSTITUTION = Constitution.model_validate_json(json.dumps(PRINCIPLES))


def silent(_done, _of):
    """Show no bar."""


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(7)))
    return read_prompts(path)


def replies(chat, seed):
    return f"{noise(seed, chat[0].content)} to {chat[-1].content}"


def revised(writer, prompts, path, batch=3):
    loop = Revision(writer, CONSTITUTION, prompts, rounds=2, seed=5)
    file = ResumableRows(path, loop.revision_lineage, batch)
    rows = file.make_all(len(prompts), loop.make_rows, silent)
    return file.finish_file(*revised_figures(rows))


def test_a_row_is_the_prompt_with_the_last_revision_and_says_how_it_came_about(prompts, tmp_path):
    told = revised(FakeWriter(replies), prompts, tmp_path / "out.jsonl")

    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == told["rows"] == told["changed"] == 7
    assert sum(told["drawn"].values()) == 14
    for row, prompt in zip(rows, prompts, strict=True):
        talk = parse_conversation(row)
        assert [one.role for one in talk.messages] == ["user", "assistant"]
        assert talk.messages[0].content == prompt.readable_text
        assert talk.messages[1].content == row["revisions"][-1]["revision"]
        for step in row["revisions"]:
            number = {"first": "1", "second": "2"}[step["principle"]]
            assert step["critique"].endswith(f"to C{number}")
            assert step["revision"].endswith(f"to R{number}")


@pytest.mark.parametrize("calls", [0, 4, 5, 9, 14])
def test_rows_have_the_same_bytes_wherever_the_process_was_killed(prompts, tmp_path, calls):
    revised(FakeWriter(replies), prompts, tmp_path / "whole.jsonl")

    with pytest.raises(KeyboardInterrupt):
        revised(FakeWriter(replies, dies_after=calls), prompts, tmp_path / "killed.jsonl")
    unfinished = tmp_path / "killed.jsonl.unfinished"
    # the disk may have got a part of the last line
    unfinished.write_bytes(unfinished.read_bytes()[: -1 if calls else None])
    assert not (tmp_path / "killed.jsonl").exists()
    writer = FakeWriter(replies)
    revised(writer, prompts, tmp_path / "killed.jsonl")

    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not unfinished.exists()
    # two batches of five calls were done, of the second of which a row was torn
    assert writer.calls == (10 if calls == 14 else 15)


def test_rows_of_another_model_are_neither_gone_on_with_nor_overwritten(prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        revised(FakeWriter(replies, dies_after=6), prompts, out)
    with pytest.raises(DataError, match="unfinished: was made with another value of model; give another name"):
        revised(FakeWriter(replies, digest="e" * 64), prompts, out)
    revised(FakeWriter(replies), prompts, out)

    loop = Revision(FakeWriter(replies), CONSTITUTION, prompts, rounds=2, seed=6)
    with pytest.raises(DataError, match="was made with another value of seed; give"):
        ResumableRows(out, loop.revision_lineage, 3).read_lineage()
    same = Revision(FakeWriter(replies), CONSTITUTION, prompts, rounds=2, seed=5)
    assert ResumableRows(out, same.revision_lineage, 3).read_lineage()["rows"] == 7
    out.write_bytes(out.read_bytes() + b"{}\n")
    with pytest.raises(DataError, match="was changed since it was made"):
        ResumableRows(out, same.revision_lineage, 3).read_lineage()


def test_a_model_that_says_nothing_keeps_its_answer_and_a_silent_answer_is_left_out(prompts, tmp_path):
    def mute(chat, seed):
        if "question 0" in chat[0].content or chat[-1].content.startswith("R"):
            return ""
        return replies(chat, seed)

    told = revised(FakeWriter(mute), prompts, tmp_path / "out.jsonl")

    assert (told["rows"], told["silent"], told["changed"]) == (6, 1, 0)
    with pytest.raises(DataError, match="no usable row"):
        revised(FakeWriter(lambda *_: ""), prompts, tmp_path / "none.jsonl")


def chosen(judge, prompts, *, ranked=False, say=None):
    writer = FakeWriter(say or (lambda chat, seed: f"{noise(seed, chat[0].content)}"))
    loop = PairChoice(writer, by_principles(judge, CONSTITUTION, 5, ranked=ranked), prompts, 5, {})
    return chosen_figures(loop.make_rows(range(len(prompts))))


def first_of(question):
    return question.partition("(A) ")[2].partition("\n")[0]


def test_a_judge_that_always_says_a_has_no_opinion_and_its_bias_is_told(prompts):
    kept, told = chosen(BiasedJudge(lambda _: 1.0), prompts)

    assert kept == []
    assert told["left_out"] == {"tie": 7}
    assert told["order_decided"] == 1.0


def test_the_order_of_the_answers_decides_nothing_where_a_judge_is_biased(prompts):
    def likes(question):
        return 0.6 if first_of(question) > question.partition("(B) ")[2].partition("\n")[0] else 0.4

    honest, _ = chosen(BiasedJudge(likes), prompts)
    biased, told = chosen(BiasedJudge(likes, bias=0.3), prompts)

    assert told["order_decided"] == 1.0
    assert [(row["chosen"], row["rejected"]) for row in biased] == [(row["chosen"], row["rejected"]) for row in honest]
    assert len(honest) == 7
    for row in biased:
        assert row["chosen"] > row["rejected"]
        said = [answer.plain_text for answer in parse_preference(row, "pairs").answers]
        assert said == [row["chosen"], row["rejected"]]


def test_ranked_principles_are_asked_in_order_to_the_first_that_is_no_tie(prompts):
    def likes(question):
        if "Q1" in question and "question 3" not in question:
            return 0.5
        return float(first_of(question) > "8")

    judge = BiasedJudge(likes)
    kept, told = chosen(judge, prompts, ranked=True)

    asked = ["Q1" if "Q1" in one else "Q2" for one in judge.asked]
    assert asked.count("Q1") == 14
    assert {row["principle"] for row in kept if row["prompt"][0]["content"] != "question 3"} <= {"second"}
    assert sum(told["left_out"].values()) + len(kept) == 7


def test_an_answer_that_holds_a_placeholder_is_shown_as_it_is(prompts):
    judge = BiasedJudge(lambda _: 0.7)
    chosen(judge, prompts[:1], say=lambda _chat, seed: f"{{second}} {seed}")

    assert judge.asked[0].count("{second}") == 2


def test_equal_and_empty_answers_make_no_pair_and_worth_no_tie(prompts):
    says = iter(["a", "b", "c", "", "e", "f", "g", "a", "x", "c", "y", "", "z", "g"])
    loop = PairChoice(FakeWriter(lambda *_: next(says)), by_worth(lambda _, text: float(text > "e")), prompts, 0, {})

    kept, told = chosen_figures(loop.make_rows(range(7)))

    assert told["left_out"] == {"equal": 3, "silent": 2, "tie": 1}
    assert [(row["chosen"], row["rejected"]) for row in kept] == [("x", "b")]


def test_a_demonstration_is_better_than_what_the_model_says(tmp_path):
    path = tmp_path / "shown.jsonl"
    path.write_text('{"prompt": "q", "demonstration": " right "}\n{"prompt": "r"}\n')
    both = read_prompts(path)
    with pytest.raises(DataError, match='line 2: has no text "demonstration"'):
        PairChoice(FakeWriter(replies), None, both, 0, {})

    rows = PairChoice(FakeWriter(replies), None, both[:1], 0, {}).make_rows(range(1))

    assert rows[0]["chosen"] == "right"
    assert rows[0]["rejected"].endswith("to q")


def test_a_prompt_that_cannot_be_answered_is_named_before_the_first_one_is(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "a" * 1001}) + "\n")
    writer = FakeWriter(replies)

    with pytest.raises(DataError, match=r"line 2: prompt: has 1001 tokens"):
        Revision(writer, CONSTITUTION, read_prompts(path), rounds=1, seed=0)
    assert writer.calls == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no line"),
        ("[]\n", "line 1: found a JSON list"),
        ('{"text": "a"}\n', "line 1: expected either prompt or messages"),
        ('{"prompt": "a"}\n\n{"prompt": " "}\n', "line 3: the prompt is empty"),
        ('{"prompt": 3}\n', "line 1: the prompt is empty"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "ends with the assistant's message"),
        ('{"messages": [{"role": "king", "content": "a"}]}\n', "line 1: turn 1: has the role 'king'"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_its_place(tmp_path, text, why):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)

    with pytest.raises(DataError, match=why):
        read_prompts(path)


def test_a_model_judges_by_the_odds_of_two_letters():
    class Letters(FakeWriter):
        def log_probs(self, chat, answers):
            assert list(answers) == ["A", "B"]
            return {"even": [-1.0, -1.0], "a": [-1.0, -1.0 - math.log(3)], "far": [-2000.0, 0.0]}[chat[0].content]

    judge = ModelJudge(Letters(replies))

    assert judge.first_probability("even") == 0.5
    assert judge.first_probability("a") == pytest.approx(0.75)
    assert 0.0 <= judge.first_probability("far") < 1e-100


def test_principles_without_a_question_cannot_choose():
    mute = Constitution.model_validate_json('{"principle": [{"name": "a", "critique": "c", "revise": "r"}]}')

    with pytest.raises(ConfigError, match="none has choose"):
        by_principles(BiasedJudge(lambda _: 0.5), mute, 0, ranked=False)


def test_a_model_that_fails_ends_the_loop_and_finished_rows_stay(prompts, tmp_path):
    def breaks(chat, seed):
        if "question 4" in chat[0].content:
            raise ModelError("a logit is no finite number")
        return replies(chat, seed)

    with pytest.raises(ModelError):
        revised(FakeWriter(breaks), prompts, tmp_path / "out.jsonl")

    assert len((tmp_path / "out.jsonl.unfinished").read_text().splitlines()) == 1 + 3
