"""The learned score of texts: trained, measured on texts that it has not seen, and read by the rules."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from safetensors.numpy import load_file, save_file

from phalanx.cli.outcome import run_command
from phalanx.data.build.passes import make_steps, pass_settings, plan_passes
from phalanx.data.build.recipe import load_recipe
from phalanx.data.build.run import build_recipe
from phalanx.data.rules import RULES, Drop, Page, RuleReason, Tag, make_rule
from phalanx.data.rules.text_classifier import (
    TextClassifier,
    find_buckets,
    is_held_out,
    measure_classifier,
    train_classifier,
)
from phalanx.data.shards import open_dataset
from phalanx.data.sources import Document
from phalanx.errors import DataError

CALM, LOUD = "river stone meadow path morning cloud", "click buy offer deal prize winner"


def make_texts(words: str, count: int, seed: int) -> list[str]:
    """Return texts in which two of three words are of one kind, and the rest of both."""
    chance = random.Random(seed)
    common = (CALM + " " + LOUD).split()
    return [
        " ".join(chance.choice(words.split() if chance.random() < 0.6 else common) for _ in range(30))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "quality.safetensors"
    classifier, _ = train_classifier(make_texts(CALM, 200, 1), make_texts(LOUD, 200, 2))
    classifier.write_file(path)
    return path


def judge(kind: str, text: str, **keys: Any) -> object:
    rule = make_rule(RULES[kind].config.model_validate({"kind": kind, **keys}))
    return rule.judge_page(Page(Document("text", text), "texts"))


def test_new_texts_are_told_apart_and_labels_at_chance_are_not() -> None:
    _, measure = train_classifier(make_texts(CALM, 200, 1), make_texts(LOUD, 200, 2))
    texts = make_texts(CALM, 400, 3)
    _, noise = train_classifier(texts[:200], texts[200:])

    assert measure.area > 0.95
    assert noise.area_interval[0] < 0.5 < noise.area_interval[1]
    middle = measure.rates[2]
    assert middle.threshold == 0.5
    assert middle.missed_interval[0] <= middle.missed <= middle.missed_interval[1] < 0.3


def test_the_measure_is_of_held_out_texts_alone_and_no_text_is_on_both_sides() -> None:
    positive, negative = make_texts(CALM, 120, 1), make_texts(LOUD, 120, 2)
    both = positive[:5]

    classifier, measure = train_classifier([*positive, *positive], [*negative, *both])

    held_out = [[text for text in texts if is_held_out(text)] for texts in (positive[5:], negative)]
    assert (measure.num_positive, measure.num_negative) == tuple(map(len, held_out))
    assert measure == measure_classifier(classifier, *held_out)
    trained = classifier.facts["trained_on"]
    assert trained == {"positive": 115 - len(held_out[0]), "negative": 120 - len(held_out[1]), "in_both": 5}


def test_the_same_texts_make_the_same_file(model: Path, tmp_path: Path) -> None:
    classifier, _ = train_classifier(make_texts(CALM, 200, 1), make_texts(LOUD, 200, 2))
    classifier.write_file(tmp_path / "again.safetensors")

    assert (tmp_path / "again.safetensors").read_bytes() == model.read_bytes()
    read = TextClassifier.from_file(model)
    assert read.facts == json.loads(json.dumps(classifier.facts))
    assert read.score_text(CALM) == pytest.approx(classifier.score_text(CALM), abs=1e-6)


def test_the_score_is_that_of_logistic_regression(model: Path) -> None:
    tensors = load_file(model)
    buckets = find_buckets(Page(Document("text", CALM), "texts"))
    # six words, five pairs, and six terms as they are written
    assert len(buckets) == 17

    total = float(tensors["bias"][0]) + float(tensors["weights"][buckets].sum()) / math.sqrt(17)

    assert TextClassifier.from_file(model).score_text(CALM) == pytest.approx(1 / (1 + math.exp(-total)), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "limit", "bad", "good"), [("quality", "min_score", LOUD, CALM), ("harm", "max_score", CALM, LOUD)]
)
def test_a_rule_tags_and_drops_beyond_its_limit_alone(kind: str, limit: str, bad: str, good: str, model: Path) -> None:
    tagged = judge(kind, bad, model=model)
    assert isinstance(tagged, Tag)
    score = tagged.fields[kind]
    assert isinstance(score, float)

    assert judge(kind, bad, model=model, **{limit: 0.5}) == Drop(RuleReason(kind, score, 0.5))
    assert isinstance(judge(kind, good, model=model, **{limit: 0.5}), Tag)
    assert judge(kind, bad, model=model, **{limit: score}) == tagged  # a border is allowed itself


def test_a_text_without_words_has_the_score_of_the_bias(model: Path) -> None:
    bias = float(load_file(model)["bias"][0])

    assert TextClassifier.from_file(model).score_text(" \n") == pytest.approx(1 / (1 + math.exp(-bias)), rel=1e-6)


@pytest.mark.parametrize(
    "fault", ["no file", "a pickle", "no facts", "another format", "a weight that is no number", "a short table"]
)
def test_a_file_that_is_no_classifier_is_refused(fault: str, model: Path, tmp_path: Path) -> None:
    path, tensors = tmp_path / "model.safetensors", load_file(model)
    facts = {"format": "phalanx-text-classifier/1"}
    if fault == "a pickle":
        path.write_bytes(b"\x80\x04cos\nsystem\n")
    elif fault != "no file":
        if fault == "no facts":
            facts = {}
        elif fault == "another format":
            facts["format"] = "other"
        elif fault == "a short table":
            tensors["weights"] = tensors["weights"][:100]
        else:
            tensors["weights"][7] = np.nan
        save_file(tensors, path, {"facts": json.dumps(facts)})

    with pytest.raises(DataError, match="is no classifier"):
        TextClassifier.from_file(path)


def test_too_few_texts_are_refused() -> None:
    with pytest.raises(DataError, match="3 positive and 100 negative texts"):
        train_classifier(make_texts(CALM, 3, 1), make_texts(LOUD, 100, 2))


def test_the_command_trains_prints_its_errors_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words, seed in (("good", CALM, 1), ("bad", LOUD, 2)):
        (tmp_path / name).mkdir()
        for number, text in enumerate(make_texts(words, 100, seed)):
            (tmp_path / name / f"{number}.txt").write_text(text)
    out = tmp_path / "quality.safetensors"
    words = ["data", "classifier", str(out), "--positive", str(tmp_path / "good"), "--negative", str(tmp_path / "bad")]

    assert run_command([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["held_out"]["area"] > 0.9
    assert TextClassifier.from_file(out).facts["held_out"] == answer["held_out"]
    assert run_command(words) == 2


def test_recipes_take_the_rules_by_name(model: Path) -> None:
    for kind, limit in (("quality", "min_score"), ("harm", "max_score")):
        config = TypeAdapter(RULES[kind].config).validate_python({"kind": kind, "model": model, limit: 0.5})
        assert config.kind == kind


def test_a_build_drops_what_scores_low_and_is_another_build_with_another_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    texts = [text for pair in zip(make_texts(CALM, 20, 5), make_texts(LOUD, 20, 6), strict=True) for text in pair]
    (tmp_path / "texts" / "all.txt").write_text("\n\n".join(texts))
    (tmp_path / "model.safetensors").write_bytes(model.read_bytes())
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""tokenizer = {{ kind = "bpe", vocab_size = 270 }}
[[sources]]
kind = "text"
path = "{tmp_path}/texts"
delimiter = "\\n\\n"
[[steps]]
kind = "quality"
model = "{tmp_path}/model.safetensors"
min_score = 0.5
[output]
validation_share = 0.0
signer = "{tmp_path}/key"
"""
    )

    def read_settings() -> list[Any]:
        loaded = load_recipe(recipe, ())
        return [pass_settings(loaded, step) for step in plan_passes(make_steps(loaded))]

    before = read_settings()

    build_recipe(load_recipe(recipe, ()), tmp_path / "out")

    kept = [entry.fields["quality"] for entry in open_dataset(tmp_path / "out").document_entries("text", "train")]
    expected = [score for text in texts if (score := round(TextClassifier.from_file(model).score_text(text), 6)) >= 0.5]
    assert sorted(kept) == sorted(expected)
    assert 15 < len(kept) < 25
    other, _ = train_classifier(make_texts(CALM, 100, 8), make_texts(LOUD, 100, 9))
    other.write_file(tmp_path / "model.safetensors")
    assert read_settings() != before


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone/a\.safetensors: cannot be written .* give another path"):
        TextClassifier(np.zeros(1 << 18, np.float32), 0.0, {}).write_file(tmp_path / "gone" / "a.safetensors")
