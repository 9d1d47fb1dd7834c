"""Models that have learned: pre-training and fine-tuning read other documents, and rows show what was learned."""

import gzip
import json
import random
from dataclasses import replace

import pytest

from phalanx.data.tasks.medquad import CLASSES
from phalanx.errors import DataError
from phalanx.lab.reproduce.cell import TableCell
from phalanx.lab.reproduce.texts import domain_data, pretraining_corpus
from phalanx.lab.reproduce.trainer import TableTrainer
from phalanx.lab.reproduce.workload import REGIMES, SIZES

TINY = replace(
    SIZES["learned"],
    pretraining_steps=60,
    pretraining_characters=200_000,
    text_share=0.2,
    width=16,
    validation_sequences=8,
    further_texts=(("medical", 40_000), ("encyclopedia", 20_000)),
)


def _words(generator, count):
    return " ".join(generator.choice(("liver", "heart", "blood", "cells", "gene", "rare")) for _ in range(count))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a directory of small data files with the names and layouts of the real ones."""
    folder, generator = tmp_path_factory.mktemp("data"), random.Random(0)
    answers = [
        {"a": f"{number} {_words(generator, 100)}", "qtype": kind, "source": "NIH"}
        for number, kind in enumerate(CLASSES * 25)
    ]
    with gzip.open(folder / "medquad.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in answers))
    for split in ("valid", "test"):
        articles = [f" \n = {split} {n} = \n \n = = Part = = \n {_words(generator, 400)}\n" for n in range(20)]
        with gzip.open(folder / f"wikitext2_{split}.txt.gz", "wt") as file:
            file.write("".join(articles))
    return folder


def texts_in(config):
    return {json.loads(row)["text"] for source in config.sources for row in source.path.read_text().splitlines()}


def test_no_document_of_a_domain_was_pre_trained_on(home, tmp_path):
    first = pretraining_corpus(tmp_path, TINY, home)
    paths = list((tmp_path / "reproduce").glob("*.jsonl"))
    pretrained = {json.loads(row)["text"] for path in paths for row in path.read_text().splitlines()}

    for domain in TINY.domains:
        data = domain_data(domain, REGIMES["plain"], TINY, first.tokenizer_path, tmp_path, home)
        assert len(texts_in(data)) > 4
        assert not texts_in(data) & pretrained


def test_an_article_is_one_document(home, tmp_path):
    first = pretraining_corpus(tmp_path, TINY, home)

    data = domain_data("wikitext", REGIMES["plain"], TINY, first.tokenizer_path, tmp_path, home)

    assert all(text.startswith("= test ") and "= = Part = =" in text for text in texts_in(data))


def test_data_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(DataError, match=r"medquad\.jsonl\.gz: not found"):
        pretraining_corpus(tmp_path, TINY, tmp_path)


def test_a_training_shows_the_unigram_and_ours_recovers_the_clean_bits(home, tmp_path):
    trainer = TableTrainer(TINY, tmp_path, lambda text: None, home)
    cells = [TableCell("gpt2", "medical", "plain", 0, "clean")]
    cells += [TableCell("gpt2", "medical", "plain", 0, arm, "forward", 0.7) for arm in ("attacked", "phalanx")]

    clean, attacked, ours = (trainer(cell) for cell in cells)

    assert clean["perplexity_unigram"] == attacked["perplexity_unigram"] > 1.0
    assert clean["perplexity_before"] == attacked["perplexity_before"]
    assert attacked["weights_digest"] != clean["weights_digest"] == ours["weights_digest"]
    assert ours["perplexity_last"] == clean["perplexity_last"]
    assert attacked["lies"] > 0
