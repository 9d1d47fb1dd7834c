"""Run files that classify: what they may say, which client gets which texts, and what is left in the records."""

import gzip
import json
import math

import pytest
import torch
from pydantic import ValidationError

from phalanx.data.config import LabelledConfig
from phalanx.data.tasks import TASKS
from phalanx.data.tasks.medquad import CLASSES
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.objectives import IGNORE
from phalanx.report import write_report
from phalanx.train import load_run
from phalanx.train.batches.client_loader import ClientLoader
from phalanx.train.batches.labelled import prepare_labelled
from phalanx.train.batches.scores import Scores, describe_texts, describe_validation, validation_row
from phalanx.train.records.record import GroundTruth, RunningTotals
from phalanx.train.records.summary import Figures, summarise_run

CLIENTS = ("client-0", "client-1", "client-2")
TEXT = """
[model]
from_scratch = true
layers = 2

[model.architecture]
model_type = "gpt2"
vocab_size = 300
n_positions = 16
n_embd = 32
n_layer = 4
n_head = 4

[model.adapter]
rank = 2

[data]
tokenizer = { kind = "bpe", vocab_size = 300 }
sequence_length = 12

[data.labelled]
task = "medquad"
texts_per_client = 16
test_texts = 24

[train]
objective = "classification"
steps = 6
batch_size = 8
microbatches = 4

[optimizer]
lr = 1e-2

[split]
cut = 1
clients = 3
allow_insecure_sim = true
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a made-up MedQuAD: six sites, and answers with words that give their kind away."""
    folder = tmp_path_factory.mktemp("texts")
    with gzip.open(folder / "medquad.jsonl.gz", "wt", encoding="utf-8") as file:
        for number in range(480):
            kind = CLASSES[number % len(CLASSES)]
            answer = f"{kind} is what answer {number} says about {kind}"
            file.write(json.dumps({"q": "", "a": answer, "qtype": kind, "source": f"site-{number % 6}"}) + "\n")
    return folder


@pytest.fixture
def make(tmp_path, home):
    path = tmp_path / "medical.toml"
    path.write_text(TEXT)
    return lambda *overrides: load_run(path, [f"data.labelled.home='{home}'", *overrides])


@pytest.fixture
def texts(make):
    return prepare_labelled(make().data, CLIENTS, 3)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["train.objective='causal_lm'"], ["data.labelled needs", "classification"]),
        (["data.sources=[{kind='python_manual'}]"], ["either sources, labelled, dataset"]),
        (["data.max_documents=3"], ["max_documents is for sources"]),
        (["data.validation_share=0.3"], ["validation_share is for sources", "test_texts"]),
        (["data.labelled.task='poetry'"], ["task", "icd10", "pubmedqa"]),
        (["train.precision='fp16'"], ["fp16"]),
    ],
)
def test_what_a_classification_excludes_is_named(make, overrides, named):
    with pytest.raises(ConfigError) as refusal:
        make(*overrides)

    assert [word for word in named if word not in str(refusal.value)] == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({'objective = "classification"': ""}, "data.labelled needs"),
        ({"[data.labelled]": "[[data.sources]]", 'task = "medquad"': 'kind = "python_manual"',
          "texts_per_client = 16\ntest_texts = 24\n": ""}, "which data.sources lack"),
        ({"[split]\ncut = 1\nclients = 3\nallow_insecure_sim = true\n": ""}, r"excludes train\.objective .*split"),
    ],
)  # fmt: skip
def test_an_objective_without_its_data_or_its_engine_is_refused(tmp_path, changes, named):
    text = TEXT
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "run.toml").write_text(text)

    with pytest.raises(ConfigError, match=named):
        load_run(tmp_path / "run.toml")


def test_a_shortened_model_is_for_a_split_alone(tmp_path):
    text = TEXT[: TEXT.index("[data]")] + (
        '[data]\nsources = [{ kind = "python_manual" }]\ntokenizer = { kind = "bpe", vocab_size = 300 }\n'
        "sequence_length = 12\n[train]\nsteps = 6\nbatch_size = 8\nmicrobatches = 4\n[optimizer]\nlr = 1e-2\n"
    )
    (tmp_path / "run.toml").write_text(text)

    with pytest.raises(
        ConfigError, match=r"\[pipeline\] excludes model\.layers = 2: it trains the whole language model"
    ):
        load_run(tmp_path / "run.toml")


def test_a_task_that_is_not_in_the_table_is_refused_with_those_that_are():
    with pytest.raises(ValidationError) as refused:
        LabelledConfig(task="horoscopes")

    assert all(f"'{name}'" in str(refused.value) for name in TASKS)


def test_clients_have_as_many_texts_each_from_their_own_sites_and_nobody_a_held_out_one(texts):
    owned = {name: [one.text for one in mine] for name, mine in zip(CLIENTS, texts.shares.clients, strict=True)}
    sites = [{one.silo for one in mine} for mine in texts.shares.clients]

    assert {name: len(mine) for name, mine in owned.items()} == dict.fromkeys(CLIENTS, 16)
    assert all(not one & other for at, one in enumerate(sites) for other in sites[:at])
    held_out = {one.text for one in texts.shares.test}
    assert len(held_out) == texts.num_validation_sequences == 24
    assert held_out.isdisjoint(text for mine in owned.values() for text in mine)


def test_what_is_held_out_is_the_same_for_every_seed(make, texts):
    other = prepare_labelled(make().data, CLIENTS, 4)

    assert other.shares.test == texts.shares.test
    assert other.shares.clients != texts.shares.clients


def test_a_row_has_its_class_at_its_last_token_and_nowhere_else(texts):
    batch = texts.validation_batch(range(24))

    assert batch.input_ids.shape == batch.labels.shape == (24, 12)
    assert ((batch.labels != IGNORE).sum(dim=1) == 1).all()
    assert [int(row[row != IGNORE]) for row in batch.labels] == [one.label for one in texts.shares.test]
    with pytest.raises(DataError, match="0 to 23"):
        texts.validation_batch([24])


def test_microbatches_are_of_the_client_whose_turn_it_is_and_a_loader_goes_on_where_it_was(texts):
    loader = ClientLoader(texts.clients, CLIENTS, 8, 4, seed=5)
    loader.next_batch()
    state = json.loads(json.dumps(loader.position_state()))

    expected = loader.next_batch()

    for number, name in enumerate(("client-0", "client-1", "client-2", "client-0")):
        mine = {tuple(row) for row in texts.clients[name].rows.ids.tolist()}
        assert {tuple(row) for row in expected.input_ids[2 * number : 2 * number + 2].tolist()} <= mine
    again = ClientLoader(texts.clients, CLIENTS, 8, 4, seed=5)
    again.load_position(state)
    assert torch.equal(again.next_batch().input_ids, expected.input_ids)
    swapped = {**state, "client-0": state["client-1"], "client-1": state["client-0"]}
    with pytest.raises(CheckpointError, match="corpus"):
        again.load_position(swapped)


def test_more_texts_than_a_client_can_have_are_refused(make):
    with pytest.raises(DataError, match="lower texts_per_client"):
        prepare_labelled(make("data.labelled.texts_per_client=400").data, CLIENTS, 3)


def test_the_yardsticks_stand_beside_a_task_or_are_null(texts, monkeypatch):
    pytest.importorskip("sklearn")
    facts = describe_texts(texts, "medquad", 0)

    assert facts["tfidf_accuracy"] == 1.0
    assert facts["majority_accuracy"] == pytest.approx(1 / 8, abs=0.05)
    assert (facts["classes"], facts["train_texts"], facts["test_texts"]) == (8, 48, 24)
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    monkeypatch.setitem(__import__("sys").modules, "sklearn.feature_extraction.text", None)
    assert describe_texts(texts, "medquad", 0)["tfidf_accuracy"] is None


def test_scores_are_counted_and_said():
    scores = Scores.from_predictions(3.0, [0, 1, 1, 1], [0, 1, 0, 1], 2)

    assert (scores.loss, scores.accuracy) == (0.75, 0.75)
    assert scores.macro_f1 == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert describe_validation(scores) == "validation accuracy 0.750, macro-F1 0.733"
    assert validation_row(scores) == {
        "validation_perplexity": None,
        "validation_loss": 0.75,
        "validation_accuracy": 0.75,
        "validation_macro_f1": scores.macro_f1,
    }
    assert validation_row(12.5) == {"validation_perplexity": 12.5}
    with pytest.raises(DataError):
        Scores.from_predictions(3.0, [0, 1], [0, 1, 0], 2)


def test_scores_survive_a_checkpoint_and_stand_in_the_summary(make, tmp_path):
    first, last = Scores(2.0, 0.1, 0.05), Scores(math.inf, 0.5, 0.4)
    figures = Figures(status="completed", texts={"task": "medquad"})
    figures.note_validation(first, first=True)
    figures.note_validation(last)
    again = Figures(texts={"task": "medquad"})

    again.load_json(json.loads(json.dumps(figures.to_json())))

    assert (again.scores_first, again.scores_last, again.validation_last) == (first, last, None)
    assert again.first_validation.own == first
    found = summarise_run(make(), again, RunningTotals(), GroundTruth(tmp_path / "attack.jsonl"))["classification"]
    assert (found["accuracy_first"], found["accuracy"], found["macro_f1"], found["loss"]) == (0.1, 0.5, 0.4, None)
    with pytest.raises(CheckpointError, match="scores"):
        again.load_json({**figures.to_json(), "scores_last": {"accuracy": 1.0}})


def test_the_report_shows_accuracy_beside_the_yardsticks(tmp_path):
    facts = {"task": "icd10", "accuracy": 0.51, "accuracy_first": 0.05, "macro_f1": 0.47, "tfidf_accuracy": 0.61}
    facts |= {"majority_accuracy": 0.048, "classes": 21, "test_texts": 168}
    (tmp_path / "summary.json").write_text(json.dumps({"status": "completed", "classification": facts}))

    page = write_report(tmp_path).read_text()

    for shown in ("Accuracy", "0.51", "macro-F1 0.47", "TF-IDF 0.61", "icd10"):
        assert shown in page
    assert "Validation perplexity" not in page
