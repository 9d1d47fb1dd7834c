"""Starters: a commented run file that the ordinary checks accept, for each way to begin."""

import gzip
import hashlib
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.data.row_layout import chats_read_as_text
from phalanx.data.shards import open_dataset
from phalanx.data.sources import open_source
from phalanx.data.tasks import Columns, load_own
from phalanx.errors import ConfigError, DataError, ModelError
from phalanx.train import DomainRun, FederatedRun, PipelineRun, SplitRun, describe_run, load_run
from phalanx.train.starter import STARTERS, Answers, run_file
from tiny_dataset import write_tiny_dataset


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.md").write_text("a tale of two stages\n" * 40)
    return folder


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 3, "n_positions": 64, "vocab_size": 300})
    )
    return folder


@pytest.fixture
def begun(tmp_path):
    """Write the run file of a way to begin and read it back."""

    def begin(way, answers):
        path = tmp_path / f"{way}.toml"
        path.write_text(run_file(way, answers))
        return load_run(path)

    return begin


OF_A_MODEL = ("finetune", "chat", "preferences")
CHAT = {"messages": [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]}
PAIR = {"prompt": "two and two?", "chosen": "four", "rejected": "five"}


def rows(path, row, number=20):
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(number)))
    return path


def data_for(way, texts):
    if way in ("split", "federated"):
        return ()
    row = {"chat": CHAT, "preferences": PAIR}.get(way)
    return (texts,) if row is None else (rows(texts.parent / f"{way}.jsonl", row),)


@pytest.mark.parametrize("way", STARTERS)
def test_every_way_to_begin_is_a_valid_run_file(begun, texts, model, way):
    answers = Answers(data_for(way, texts), model if way in OF_A_MODEL else None)

    run = begun(way, answers)

    kind = {"split": SplitRun, "cluster": DomainRun, "federated": FederatedRun}.get(way, PipelineRun)
    assert type(run) is kind
    assert kind is not PipelineRun or ("guard" in run.model_fields_set and run.guard.preset == "standard")


@pytest.mark.parametrize(
    ("way", "digest"),
    [
        ("scratch", "4780a66361574382"),
        ("remote", "8b228d528b1fefb4"),
        ("cluster", "0c46f95db7470df9"),
        ("split", "05a0355eb0051fbe"),
        ("federated", "c242c4584d03fcdf"),
    ],
)
def test_a_starter_without_answers_is_the_text_of_its_templates_byte_for_byte(way, digest):
    assert hashlib.sha256(run_file(way, Answers()).encode()).hexdigest()[:16] == digest


def test_an_answer_that_looks_like_a_placeholder_is_text():
    assert 'remote_workers = ["$stages", "STAGES"]' in run_file("remote", Answers(workers=("$stages", "STAGES")))


@pytest.mark.parametrize("way", [way for way in STARTERS if way not in ("split", "federated")])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_fresh_file_may_be_tried_with_a_few_steps(texts, model, tmp_path, way, steps):
    path = tmp_path / "run.toml"
    path.write_text(run_file(way, Answers(data_for(way, texts), model if way in OF_A_MODEL else None)))

    assert load_run(path, [f"train.steps={steps}"]).train.steps == steps


def test_a_remote_run_keeps_its_states_and_validates_and_saves_several_times(begun, texts):
    run = begun("remote", Answers((texts,)))

    assert run.journals
    assert 5 * run.train.validate_every <= run.train.steps
    assert 10 * run.checkpoint.every <= run.train.steps


def test_a_starter_says_what_it_will_do_when_asked_for_a_dry_run(begun, texts):
    # a vocabulary of 512 wants that many different words
    (texts / "words.md").write_text("\n\n".join(f"{number:x} tale{number * 7919:x} of" for number in range(2000)))
    page = io.StringIO()

    Console(file=page, width=120).print(describe_run(begun("scratch", Answers((texts,)))))

    assert "standard" in page.getvalue()


def test_of_a_small_text_enough_is_held_out_and_of_a_large_one_as_little_as_usual(begun, texts, tmp_path):
    large = tmp_path / "large.txt"
    large.write_text("a word of many\n\n" * 20_000)

    shares = [begun("scratch", Answers((one,))).data.validation_share for one in (texts, large)]

    assert shares == [0.25, 0.05]


def test_a_model_decides_stages_length_and_tokenizer(begun, texts, model):
    run = begun("finetune", Answers((texts,), model))

    assert (run.pipeline.stages, run.data.sequence_length, run.data.tokenizer.kind) == (3, 64, "model")
    assert run.model.adapter.kind == "lora"


@pytest.mark.parametrize("names", [("ann",), ("ann", "ben", "cy")], ids=["one, which the owner checks", "three"])
def test_each_worker_gets_a_stage(begun, texts, names):
    run = begun("remote", Answers((texts,), workers=names))

    assert (run.pipeline.stages, run.pipeline.remote_workers) == (len(names) + 2, names)


def test_steps_and_vocabulary_grow_with_the_text(begun, tmp_path):
    sizes = {}
    for size in (1_000, 3_000_000):
        path = tmp_path / f"{size}.txt"
        path.write_text("x" * size)
        run = begun("scratch", Answers((path,)))
        sizes[size] = (run.train.steps, run.data.tokenizer.vocab_size, run.model.architecture["vocab_size"])

    assert sizes == {1_000: (50, 512, 512), 3_000_000: (976, 2048, 2048)}


@pytest.mark.parametrize(
    ("name", "content", "kind", "field"),
    [
        ("a.jsonl", b'{"id": "1", "text": "short", "body": "much longer than it"}\n', "jsonl", "text"),
        ("b.jsonl", b'{"id": "1", "body": "the longest string of it"}\n', "jsonl", "body"),
        ("c.jsonl.gz", gzip.compress(b'{"body": "packed"}\n', mtime=0), "jsonl", "body"),
        ("d.html", b"<p>a page</p>", "html", None),
        ('with "quotes" and \u00fc.txt', b"text", "text", None),
    ],
    ids=["text", "longest", "packed", "html", "quotes"],
)
def test_the_kind_of_a_source_is_seen_by_its_files(begun, tmp_path, name, content, kind, field):
    path = tmp_path / name
    path.write_bytes(content)

    (source,) = begun("scratch", Answers((path,))).data.sources

    assert (source.kind, source.path, getattr(source, "field", None)) == (kind, path, field)
    if kind != "html":
        assert [document.text for document in open_source(source).documents()]


def test_every_further_kind_is_seen_by_its_files_and_its_first_record(begun, tmp_path):
    table = io.BytesIO()
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    parquet.write_table(pa.table({"n": [1], "tags": [["a"]], "body": ["a text"]}), table)
    coded = io.BytesIO()
    parquet.write_table(pa.table({"n": [1], "body": pa.array(["a text"]).dictionary_encode()}), coded)
    files = {
        "coded.parquet": (coded.getvalue(), "parquet", {"column": "body"}),
        "a.warc.gz": (b"", "warc", {}),
        "a.parquet": (table.getvalue(), "parquet", {"column": "body"}),
        "a.csv": (b"id,said\n1,a longer text\n", "csv", {"template": "{said}"}),
        "a.tsv": (b"id\ttext\n1\tshort\n", "csv", {"template": "{text}"}),
        "excel.csv": ("\ufeffsaid,id\r\na longer text,1\r\n".encode(), "csv", {"template": "{said}"}),
        "a.mbox": (b"From a\n\ntext\n", "mail", {}),
        "a.epub": (b"PK", "epub", {}),
        "a.rs": (b"fn main() {}\n", "code", {}),
        "chat.jsonl": (b'{"messages": [{"role": "user", "content": "hello"}]}\n', "dialogue", {}),
        "alpaca.jsonl": (b'{"instruction": "say", "output": "a much longer answer"}\n', "dialogue", {}),
    }
    for name, (content, kind, keys) in files.items():
        path = tmp_path / name
        path.write_bytes(content or gzip.compress(b"WARC/1.0\r\n", mtime=0))

        (source,) = begun("scratch", Answers((path,))).data.sources

        assert (source.kind, source.path) == (kind, path), name
        assert {key: getattr(source, key) for key in keys} == keys, name


CHAT_ROWS = [
    CHAT,
    {"text": "user: two and two?", **CHAT},
    {"conversations": [{"from": "human", "value": "two and two?"}, {"from": "gpt", "value": "four"}]},
    {"instruction": "add", "input": "2 2", "output": "4"},
    {"prompt": "two and two?", "completion": "four"},
]


@pytest.mark.parametrize("row", CHAT_ROWS, ids=",".join)
@pytest.mark.parametrize("way", ["finetune", "chat", "remote", "cluster"])
def test_conversations_are_learned_as_such_by_a_model(begun, model, tmp_path, way, row):
    path = rows(tmp_path / "chats.jsonl", row)

    run = begun(way, Answers((path,), model))

    (source,) = run.data.conversations.sources
    assert (source.path, run.data.sources, run.data.attention) == (path, (), "document")
    assert chats_read_as_text(run.data.sources, "data.sources") == []


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, "plain"),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, "model"),
        ({"chat_template.jinja": "{{ messages }}"}, "model"),
        ({"tokenizer.json": '{"added_tokens": [{"content": "<|im_end|>"}]}'}, "model"),
    ],
)
def test_a_model_without_a_template_and_its_tokens_gets_the_plain_one(begun, model, tmp_path, files, template):
    for name, content in files.items():
        (model / name).write_text(content)

    run = begun("chat", Answers((rows(tmp_path / "chats.jsonl", CHAT),), model))

    assert run.data.conversations.template == template


@pytest.mark.parametrize(
    ("row", "shape", "objective"),
    [
        (PAIR, "pairs", "dpo"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}, "hh", "dpo"),
        ({"prompt": "a", "completion": "b", "label": True}, "labelled", "kto"),
    ],
)
def test_preferences_are_learned_by_the_objective_of_their_shape(begun, model, tmp_path, row, shape, objective):
    run = begun("preferences", Answers((rows(tmp_path / "pairs.jsonl", row),), model))

    (source,) = run.data.preferences.sources
    assert (source.shape, run.train.objective_kind) == (shape, objective)


@pytest.mark.parametrize("way", ["chat", "preferences", "finetune"])
def test_rows_of_another_kind_are_refused_with_the_kind_to_take(model, texts, tmp_path, way):
    wrong = {"chat": PAIR, "preferences": CHAT, "finetune": PAIR}[way]
    says = {"chat": "holds preferences", "preferences": "holds conversations", "finetune": "--kind preferences"}[way]

    with pytest.raises(ConfigError, match=says):
        run_file(way, Answers((rows(tmp_path / "rows.jsonl", wrong),), model))
    if way != "finetune":
        with pytest.raises(ConfigError, match="holds text"):
            run_file(way, Answers((texts,), model))
        with pytest.raises(ConfigError, match="found none"):
            run_file(way, Answers((), model))


def test_conversations_beside_text_are_refused(model, texts, tmp_path):
    with pytest.raises(ConfigError, match="a run learns from rows of one kind"):
        run_file("finetune", Answers((rows(tmp_path / "chats.jsonl", CHAT), texts), model))


def test_conversations_in_a_table_are_refused_with_what_to_do(model, tmp_path):
    (tmp_path / "chats.csv").write_text("prompt,completion\na,b\n")

    with pytest.raises(DataError, match="convert it to JSON lines"):
        run_file("finetune", Answers((tmp_path / "chats.csv",), model))


def test_a_site_has_the_labelled_texts_that_are_given_for_it(begun, tmp_path):
    for name in ("north", "south", "east"):
        (tmp_path / f"{name}.csv").write_text(as_csv(NOTES))
    paths = tuple(tmp_path / f"{name}.csv" for name in ("north", "south", "east"))

    three = begun("federated", Answers(paths, made=tmp_path / "three"))
    two = begun("federated", Answers(paths[:2], made=tmp_path / "two"))

    assert (three.federated.sites, three.federated.secure) == (("site-1", "site-2", "site-3"), True)
    assert len(three.data.labelled.own_task.train) == 3
    assert (two.federated.sites, two.federated.secure) == (("site-1", "site-2"), False)


def test_a_dataset_of_shards_is_trained_from_with_its_vocabulary_and_its_signer(begun, tmp_path):
    write_tiny_dataset(
        tmp_path / "made", {"web": [f"a text about number {n} and its neighbours" for n in range(40)]}, 270
    )

    run = begun("scratch", Answers((tmp_path / "made",)))

    assert (run.data.dataset.path, run.data.sources) == (tmp_path / "made", ())
    assert run.data.dataset.signer == open_dataset(tmp_path / "made").signer
    assert run.model.architecture["vocab_size"] == 270
    with pytest.raises(ConfigError, match="give it alone"):
        begun("scratch", Answers((tmp_path / "made", tmp_path / "made")))


def test_the_kind_that_has_most_bytes_is_taken_of_a_directory(begun, texts):
    (texts / "big.jsonl").write_text('{"text": "' + "x" * 5000 + '"}\n')

    (source,) = begun("scratch", Answers((texts,))).data.sources

    assert source.kind == "jsonl"


def test_a_few_files_are_cut_into_paragraphs_so_that_some_can_be_held_out(begun, texts):
    (source,) = begun("scratch", Answers((texts,))).data.sources
    for number in range(200):
        (texts / f"{number}.txt").write_text("a short one")
    (of_many,) = begun("scratch", Answers((texts,))).data.sources

    assert (source.delimiter, of_many.delimiter) == ("\n\n", None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat.jsonl", '{"messages": []}', "no field with text"),
        ("empty.csv", "only,names\n", "not a table with a row of names"),
        ("german.csv", "text;n\na text;1\n", "its one column is 'text;n'.* set `delimiter` of a csv source"),
        ("torn.parquet", "PAR1", "not a Parquet file"),
        ("list.jsonl", "[1]", "no field with text"),
        ("torn.jsonl", "{", "line 1: not JSON"),
        ("picture.png", "x", r"no text found; expected files that end in \.jsonl"),
    ],
)
def test_data_that_no_source_reads_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)

    with pytest.raises(DataError, match=message):
        run_file("scratch", Answers((tmp_path / name,)))


@pytest.mark.parametrize(
    ("way", "answers", "message"),
    [
        (
            "forty",
            Answers(),
            "found 'forty'; expected one of scratch, finetune, chat, preferences, remote, cluster, split, federated",
        ),
        ("finetune", Answers(), "give its directory with --model"),
        ("chat", Answers(), "give its directory with --model"),
        ("preferences", Answers(), "give its directory with --model"),
        ("federated", Answers((Path("one"),)), "give --data once for each of at least two sites"),
        ("federated", Answers(task="x-rays"), "found 'x-rays'; expected one of"),
        ("remote", Answers(workers=()), "name at least one"),
        ("split", Answers(task="x-rays"), "found 'x-rays'; expected one of"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(way, answers, message):
    with pytest.raises(ConfigError, match=message):
        run_file(way, answers)


def test_paths_that_hold_nothing_are_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere: not found; give the path"):
        run_file("scratch", Answers((tmp_path / "nowhere",)))
    with pytest.raises(ModelError, match="nowhere: is no directory; give one"):
        run_file("finetune", Answers((), tmp_path / "nowhere"))


NOTES = [
    {"id": n, "note": f"case {n}: {('fever', 'a fall')[n % 2]}", "kind": ("flu", "fracture")[n % 2]} for n in range(30)
]


def as_csv(rows):
    return "\n".join([",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]) + "\n"


def test_one_labelled_file_becomes_a_split_of_one_client_with_a_fifth_of_each_class_held_out(begun, tmp_path):
    (tmp_path / "notes.csv").write_text(as_csv(NOTES))

    run = begun("split", Answers((tmp_path / "notes.csv",), made=tmp_path / "made"))

    own = run.data.labelled.own_task
    assert (own.classes, own.text, own.label) == (("flu", "fracture"), "note", "kind")
    assert (run.split.clients, run.split.release) == (1, None)
    train, test = load_own(own.train[0], own.test[0], Columns(own.text, own.label, own.classes))
    assert (len(train), [one.label for one in test].count(0), [one.label for one in test].count(1)) == (24, 3, 3)
    assert (tmp_path / "made" / "notes.test.jsonl").stat().st_mode & 0o077 == 0


def test_folders_with_train_and_test_are_a_client_each_and_are_used_as_they_are(begun, tmp_path):
    for name, suffix in (("north", "jsonl"), ("south", "csv")):
        (tmp_path / name).mkdir()
        for file, rows in (("train", NOTES[:20]), ("test", NOTES[20:])):
            text = as_csv(rows) if suffix == "csv" else "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / name / f"{file}.{suffix}").write_text(text)

    run = begun("split", Answers((tmp_path / "north", tmp_path / "south"), made=tmp_path / "made"))

    named = [str(path) for path in run.data.labelled.own_task.train]
    assert named == [str(tmp_path / "north" / "train.jsonl"), str(tmp_path / "south" / "train.csv")]
    assert (run.split.clients, run.split.release.min_clients) == (2, 2)
    assert not (tmp_path / "made").exists()


def test_a_folder_of_a_folder_for_each_class_is_labelled_text(begun, tmp_path):
    for name in ("calm", "storm"):
        (tmp_path / "sea" / name).mkdir(parents=True)
        for number in range(5):
            (tmp_path / "sea" / name / f"{number}.txt").write_text(f"{name} sea on day {number}")

    run = begun("split", Answers((tmp_path / "sea",), made=tmp_path / "made"))

    assert run.data.labelled.own_task.classes == ("calm", "storm")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "x"}], "has one class only"),
        (
            [{"a": "one", "b": "two"}, {"a": "three", "b": "four"}],
            "cannot tell the column of the label; its columns are a, b",
        ),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], "every class has fewer than 5 texts"),
    ],
)
def test_labelled_texts_that_nothing_can_be_learned_from_are_refused_and_leave_nothing(tmp_path, rows, why):
    (tmp_path / "notes.csv").write_text(as_csv(rows))

    with pytest.raises(DataError, match=why):
        run_file("split", Answers((tmp_path / "notes.csv",), made=tmp_path / "made"))
    assert not (tmp_path / "made").exists()
