"""The bench of marks counts what it says: on a small model and few documents every row is there and plausible."""

import random

import pytest
import tokenizers
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from phalanx.lab.bench.serving.filters import _attack_row, _input_row, _output_row, _write_lists
from phalanx.lab.bench.serving.mark_theory import (
    cost_rows,
    drawn_keys,
    entropy_rows,
    false_alarm_rows,
    marginal_rows,
)
from phalanx.lab.bench.serving.marked_texts import (
    ARMS,
    EDITS,
    BatchWriter,
    quality_rows,
    repeated_share,
    robustness_rows,
    write_all,
)
from phalanx.lab.bench.serving.paraphrases import RULES, paraphrase_row

VOCAB = 400
PROSE = "The owner of the run judges the texts that came back, and nothing is believed that was not read again. " * 4


@pytest.fixture(scope="module")
def writer():
    words = {"<end>": 0} | {f"w{number}": number for number in range(1, VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=128, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    return BatchWriter(
        GPT2LMHeadModel(config).eval(), PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    )


def test_texts_with_deduplication_follow_the_model_and_texts_without_do_not():
    rows = {(row["what"], row["temperature"]): row["p_value"] for row in marginal_rows(3000)}

    assert rows.pop(("text without deduplication", 1.0)) < 1e-6
    assert len(rows) == 3
    assert all(p_value > 1e-3 for p_value in rows.values())


def test_more_entropy_takes_fewer_tokens():
    low, high = entropy_rows(10, (1.0, 3.0))

    assert high["median"] < low["median"] < 100
    assert low["not_found"] == high["not_found"] == 0


def test_documents_of_nobody_are_judged_both_ways_and_short_ones_are_counted():
    generator = torch.Generator().manual_seed(0)
    documents = [("random", torch.randint(0, 500, (60,), generator=generator).tolist()) for _ in range(20)]
    rows = false_alarm_rows([*documents, ("random", [1, 2, 3])], drawn_keys(4, 1))

    counts = {(row["kind"], row["way"]): row["documents"] for row in rows}
    assert counts["all", "deduplicated"] == counts["all", "every place"] == 20
    assert counts["random", "too short"] == 1
    assert all(row["at_1e-06"] == 0 for row in rows)


def test_every_arm_writes_and_marks_are_found_where_they_are(writer):
    (key,) = drawn_keys(1, 7)
    prompts = [[number, number + 1] for number in range(1, 9)]
    texts = write_all(writer, prompts, key, 60, 8)
    quality = {row["arm"]: row for row in quality_rows(writer, texts, key)}
    edits = {row["edit"]: row for row in robustness_rows(writer, texts["marked, temperature 1"], key)}

    assert quality.keys() == {arm.name for arm in ARMS}
    assert quality["marked, temperature 1"]["found"] == quality["marked, temperature 1"]["texts"] == 8
    assert all(row["found"] == 0 for arm, row in quality.items() if arm.startswith("plain"))
    assert quality["bias 2, greedy"]["median_log10_p"] < -2
    assert edits.keys() == EDITS.keys()
    assert edits["none"]["found"] == 8
    assert edits["delete 50 %"]["median_log10_p"] > edits["none"]["median_log10_p"]


def test_the_cost_has_a_row_for_each_batch():
    rows = cost_rows(100, 2)

    assert [row["batch"] for row in rows] == [1, 8]
    assert all(row[f"{way}_ms"] >= 0 for row in rows for way in ("marked", "seeded", "torch"))


def test_runs_that_stood_before_are_counted():
    assert repeated_share([1, 2, 3, 4, 5]) == 0.0
    assert repeated_share([1] * 9) == 5 / 6


def test_filters_have_a_row_each_and_a_recited_text_is_stopped(tmp_path):
    trained = [f"Number {number}: " + PROSE for number in range(3)]
    lists = _write_lists(tmp_path, trained)
    clean = ["Some harmless words about the weather of the year 1998, and its rain. " * 3]

    assert _input_row("all", clean)["touched"] == 0
    row = _output_row("all", lists, clean)
    attack = _attack_row(lists, trained)

    assert row["touched"] == 0
    assert row["max_held_characters"] < 40
    assert attack["stopped"] == 3
    assert attack["max_out"] < 223


def test_paraphrases_by_rules_change_runs_of_tokens_and_keep_sentences():
    text = "He was in the house, and she knew. It rained; they left. Nothing else"
    changed = {name: rule(text, random.Random(1)) for name, rule in RULES.items()}

    assert changed["none"] == text
    assert sorted(changed["sentences in another order"].split()) == sorted(text.split())
    assert changed["clauses turned"].startswith("and she knew, He was in the house. It rained;")
    assert changed["synonyms"].startswith("the man had been within the house, and the woman knew.")
    assert changed["synonyms, clauses turned"] == RULES["clauses turned"](changed["synonyms"], random.Random(1))


def test_a_paraphrase_that_changes_nothing_keeps_every_run_and_the_mark(writer):
    (key,) = drawn_keys(1, 3)
    (arm,) = [arm for arm in ARMS if arm.name == "marked, temperature 1"]
    texts = writer.write([[1, 2, 3]] * 2, arm.make_draws(key, 2), 60)

    same = paraphrase_row(writer, "none", texts, [text.text for text in texts], key)
    gone = paraphrase_row(writer, "empty", texts, ["", ""], key)

    assert same["kept_runs"] == 1.0
    assert gone["kept_runs"] is None
    assert (gone["found"], gone["median_log10_p"]) == (0, 0.0)
