"""Rewards come from a child with a time limit: right numbers, or an error that names the text."""

import http.server
import json
import shutil
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from machine_patience import patience_s
from phalanx.config import config_of, pin_own_code
from phalanx.errors import ConfigError, RewardError
from phalanx.rewards import RewardsConfig, RewardScorer, ScoredText
from phalanx.rewards.server import ServedModel, ServerSettings

OWN = """
import os, time

def length(prompt, text, record):
    print("a user may print")
    return len(text) + record["bonus"]

def odd(prompt, text, record):
    if text == "hang":
        time.sleep(600)
    if text == "die":
        os._exit(3)
    return {"nan": float("nan"), "inf": float("inf"), "word": "good", "none": None, "large": 1e9, "fine": 1}[text]
"""


def scorer(tmp_path, *rewards, timeout_s=20.0):
    (tmp_path / "own.py").write_text(OWN)
    data = {"of": list(rewards), "timeout_s": timeout_s}
    pin_own_code(data, tmp_path)
    return RewardScorer(RewardsConfig.model_validate_json(json.dumps(data)), tmp_path, tmp_path / "rewards.log")


def text(said, **record):
    return ScoredText("prompts.jsonl, line 7, text 2", "2 + 2 =", said, record)


def test_rules_and_a_function_of_the_users_own_say_what_a_text_is_worth(tmp_path):
    rewards = (
        {"kind": "exact"},
        {"kind": "places", "weight": 0.5},
        {"kind": "pattern", "pattern": "^[0-9 ]+$"},
        {"kind": "own.py:length", "weight": -0.1},
    )
    with scorer(tmp_path, *rewards) as found:
        scores = found.score_texts([text(" 42 ", answer="42", bonus=1), text("4x", answer="42", bonus=0)])

        assert scores == [(1.0, 1.0, 1.0, 5.0), (0.0, 0.5, 0.0, 2.0)]
        assert found.total_reward(scores[0]) == pytest.approx(1.0 + 0.5 + 1.0 - 0.5)
        assert found.reward_names == ("exact", "places", "pattern", "length")
    assert "a user may print" in (tmp_path / "rewards.log").read_text()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("nan", "found nan, expected a finite number"),
        ("inf", "found inf, expected a finite number"),
        ("word", "found 'good', expected a finite number"),
        ("none", "found None, expected a finite number"),
        ("large", "expected a finite number of at most 1e+06 in size"),
        ("unknown", "KeyError"),
        ("die", "its process ended: exit code 3"),
    ],
)
def test_a_reward_that_is_none_names_the_reward_and_the_text(tmp_path, said, why):
    with scorer(tmp_path, {"kind": "exact"}, {"kind": "own.py:odd"}) as found:
        with pytest.raises(RewardError) as caught:
            found.score_texts([text("fine", answer="a"), text(said, answer="a")])

        assert str(caught.value).startswith("rewards.of[1] (odd), prompts.jsonl, line 7, text 2: ")
        assert why in str(caught.value)
        # and the next text is scored as if nothing had been
        assert found.score_texts([text("fine", answer="a")]) == [(0.0, 1.0)]


def test_a_reward_that_hangs_is_ended_and_named(tmp_path):
    # a text that does not hang is scored within it as well
    timeout_s = patience_s(3.0)
    with scorer(tmp_path, {"kind": "own.py:odd"}, timeout_s=timeout_s) as found:
        found.score_texts([text("fine")])
        pid = found._child.pid
        with pytest.raises(RewardError, match=rf"text 2: took longer than rewards\.timeout_s = {timeout_s:g}"):
            found.score_texts([text("hang")])

        assert not Path(f"/proc/{pid}").exists()


def test_a_record_without_the_answer_is_named(tmp_path):
    said = 'line 7, text 2: its record has no text "solution"'
    with scorer(tmp_path, {"kind": "exact", "field": "solution"}) as found, pytest.raises(RewardError, match=said):
        found.score_texts([text("4")])


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"kind": "pattern", "pattern": "("}, "is no regular expression"),
        ({"kind": "exat"}, "exat"),
        ({"kind": "judge", "url": "file:///etc/passwd", "model": "m"}, "url"),
        ({"kind": "judge", "url": "http://a/v1", "model": "m", "question": "?"}, "write {text} where it belongs"),
        ({"kind": "exact", "weight": 1e9}, "weight"),
    ],
)
def test_a_reward_that_is_written_wrongly_is_refused_when_the_file_is_read(reward, said):
    with pytest.raises(ConfigError, match=said):
        config_of({"of": [reward]}, Path("run.toml"), RewardsConfig)


def a_reward_model(labels=1):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=28, num_labels=labels, pad_token_id=0, **sizes)).eval()


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A directory in the hub's layout, and the model that is in it; its tokenizer knows letters."""
    path, model = tmp_path_factory.mktemp("reward"), a_reward_model()
    words = {word: number for number, word in enumerate(["<pad>", " ", *"abcdefghijklmnopqrstuvwxyz"])}
    backend = Tokenizer(models.WordLevel(words, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path, lambda text: float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0].detach())


def test_a_reward_model_scores_prompt_and_text_together(tmp_path, reward_model):
    path, scored = reward_model
    texts = [ScoredText("line 1", "is it ", "good"), ScoredText("line 2", "is it ", "bad")]

    with scorer(tmp_path, {"kind": "model", "path": str(path)}, timeout_s=60.0) as found:
        (good,), (bad,) = found.score_texts(texts)

    assert good != bad
    assert (good, bad) == pytest.approx((scored("is it good"), scored("is it bad")), abs=1e-6)


TEMPLATE = "{% for m in messages %}{{ m.role[0] + m.content }}e\n{% endfor %}"


@pytest.fixture
def with_an_end(reward_model, tmp_path):
    """The same with a small window; its tokenizer ends texts with the letter e, as its template does turns."""
    copy = tmp_path / "copy"
    shutil.copytree(reward_model[0], copy)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(copy, eos_token="e")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(copy)
    config = json.loads((copy / "config.json").read_text()) | {"max_position_embeddings": 12}
    (copy / "config.json").write_text(json.dumps(config))
    return {"kind": "model", "path": str(copy)}, reward_model[1]


def test_the_score_is_that_of_the_last_token_and_a_text_beyond_the_window_is_named(tmp_path, with_an_end):
    reward, scored = with_an_end
    chat = [{"role": "user", "content": "hi"}]
    asked = [ScoredText("1", "is it ", "good"), ScoredText("2", "is it ", "goode"), ScoredText("3", "hi", "go")]
    asked[2] = ScoredText("3", "hi", "go", {"prompt": chat})

    with scorer(tmp_path, reward, timeout_s=60.0) as found:
        (ends_none,), (ends_itself,), (of_a_chat,) = found.score_texts(asked)
        beyond = "line 7: .*copy: prompt and text have 13 tokens, its window is 12"
        with pytest.raises(RewardError, match=beyond):
            found.score_texts([ScoredText("line 7", "a" * 6, "b" * 6)])

    assert ends_none == ends_itself == pytest.approx(scored("is it goode"), abs=1e-6)
    assert of_a_chat == pytest.approx(scored("uhie\nagoe"), abs=1e-6)


def test_a_reward_model_sees_the_tools_of_a_chat_and_no_special_token_in_a_text(tmp_path, with_an_end):
    reward, scored = with_an_end
    path = Path(reward["path"])
    (path / "chat_template.jinja").write_text("{% for t in tools or [] %}{{ t.name }} {% endfor %}" + TEMPLATE)
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 64}
    (path / "config.json").write_text(json.dumps(config))
    record = {"prompt": [{"role": "user", "content": "hi"}], "tools": [{"name": "tide"}]}

    with scorer(tmp_path, reward, timeout_s=60.0) as found:
        ((of_a_chat,),) = found.score_texts([ScoredText("1", "hi", "go", record)])

    assert of_a_chat == pytest.approx(scored("tide uhie\nagoe"), abs=1e-6)


def take_the_score(path):
    """Leave the model without its head, which transformers would draw; as many numbers have another name."""
    weights = load_file(path / "model.safetensors")
    weights["head.weight"] = weights.pop("score.weight")
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def claim(**changes):
    """Change the config of a model, not its weights."""

    def change(path):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.mark.quick_cases("no score", "claimed vocabulary")
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: (path / "config.json").unlink(), "is no reward model that transformers loads"),
        (lambda path: (path / "model.safetensors").unlink(), "is no reward model that transformers loads"),
        (lambda path: a_reward_model(2).save_pretrained(path), "has 2 classes; a reward model has one"),
        (take_the_score, r"lacks the tensors score\.weight"),
        (claim(vocab_size=2**40), r"is no reward model that transformers loads \(.*claims [0-9]+ numbers"),
        (claim(num_hidden_layers=2**40), r"is no reward model that transformers loads \(.*num_hidden_layers: found"),
    ],
    ids=["no config", "no weights", "two classes", "no score", "claimed vocabulary", "claimed layers"],
)
def test_a_directory_that_is_no_reward_model_is_refused_by_name(tmp_path, reward_model, harm, said):
    copy = tmp_path / "copy"
    shutil.copytree(reward_model[0], copy)
    harm(copy)

    with (
        scorer(tmp_path, {"kind": "model", "path": str(copy)}, timeout_s=60.0) as found,
        pytest.raises(RewardError, match=f"{copy}: {said}"),
    ):
        found.score_texts([text("fine")])


class Judge(http.server.BaseHTTPRequestHandler):
    """Answers with what the answer asks for, and keeps what it was sent."""

    asked: ClassVar[list[dict]] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append({"key": self.headers["authorization"], "path": self.path, **body})
        said = body["messages"][0]["content"].rpartition("Answer: ")[2]
        if said == "elsewhere":
            self.send_response(302)
            self.send_header("location", "http://127.0.0.1:1/v1")
            self.end_headers()
            return
        reply = b"{" if said == "broken" else json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


@pytest.fixture
def judge():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Judge.asked = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_judge_is_asked_with_the_key_of_a_file_and_its_one_number_is_the_reward(tmp_path, judge):
    (tmp_path / "key").write_text("sesame\n")
    reward = {"kind": "judge", "url": judge, "model": "owl", "key_file": str(tmp_path / "key")}
    with scorer(tmp_path, reward) as found:
        assert found.score_texts([text("I say 7.5")]) == [(7.5,)]

    assert [(one["key"], one["path"], one["model"]) for one in Judge.asked] == [
        ("Bearer sesame", "/v1/chat/completions", "owl")
    ]
    assert "Prompt: 2 + 2 =" in Judge.asked[0]["messages"][0]["content"]


@pytest.mark.parametrize("content", [b"sesame\n# of the judge", b"", "sesame\u00e9".encode(), b"\xffsesame"])
def test_a_file_that_holds_no_key_is_refused_and_not_quoted(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    where = ServerSettings(url="http://127.0.0.1:9/v1", model="owl", key_file=tmp_path / "key")

    with pytest.raises(ConfigError, match="holds no key") as refusal:
        ServedModel(where).ask_question("?")

    assert "sesame" not in str(refusal.value)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("good", "the judge said 0 numbers"),
        ("7 of 10", "the judge said 2 numbers"),
        ("broken", "gives no answer that can be read"),
        ("elsewhere", "gives no answer that can be read"),
    ],
)
def test_a_judge_that_gives_no_number_ends_the_run_by_name(tmp_path, judge, said, why):
    reward = {"kind": "judge", "url": judge, "model": "owl"}
    with scorer(tmp_path, reward) as found, pytest.raises(RewardError, match=why):
        found.score_texts([text(said)])
