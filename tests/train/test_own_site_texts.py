"""A site's own chats and pairs: its file names them, its share is all of them, and nobody else computes with them."""

import json
import tomllib

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.errors import ConfigError
from phalanx.federated.algorithms import PlainRule
from phalanx.models import open_model
from phalanx.optimizers import learning_rate
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.train.batches.site_data import SharedTexts
from phalanx.train.parties.site_process import _open_site
from phalanx.train.sessions.site_file import read_site, terms_of
from tiny_run_file import tiny_run_file

SECTION = (
    '[federated]\nsites = ["north", "south", "east"]\nmin_cohort = 3\nsecure = true\ncarrier = "bridge"\npki = "p"\n'
)


def byte_vocabulary(tmp_path):
    """A tokenizer of single bytes, which all sites have."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: n for n, one in enumerate(["<|endoftext|>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return f'{{ kind = "file", path = "{tmp_path / "tokenizer.json"}" }}'


def write_records(path, kind, letter):
    rows = (
        [{"prompt": f"{n}?", "chosen": letter * 2, "rejected": letter} for n in range(12)]
        if kind == "preferences"
        else [
            {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": letter}]}
            for n in range(40)
        ]
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f'[{{ path = "{path}" }}]'


@pytest.fixture
def place(tmp_path):
    """Keys, a run of pairs or chats, and north's file with files of its own of some kind."""
    create_authority(tmp_path / "keys")
    for name in ("owner", "north", "south", "east"):
        issue_certificate(tmp_path / "keys", name)

    def write(kind, own, *, tokenizer=None):
        everybodys = write_records(tmp_path / "shared.jsonl", kind, "Q")
        text = tiny_run_file(SECTION).replace(
            'sources = [{ kind = "python_manual" }]', f'{kind} = {{ sources = {everybodys}, template = "plain" }}'
        )
        text = text.replace('{ kind = "bpe", vocab_size = 300 }', tokenizer or byte_vocabulary(tmp_path))
        text = text.replace("max_documents = 12\n", "").replace("= 16\n", "= 64\n")
        if kind == "preferences":
            text = text.replace("[train]\n", '[train]\nobjective = "dpo"\n')
        (tmp_path / "run.toml").write_text(text)
        words = {"run": tmp_path / "run.toml", "identity": tmp_path / "keys" / "north", "socket": tmp_path / "s"}
        words["certificates"] = tmp_path / "keys"
        lines = [f'{name} = "{value}"' for name, value in words.items()]
        own_files = write_records(tmp_path / "own.jsonl", own, "Z")
        (tmp_path / "north.toml").write_text("\n".join([*lines, f"{own} = {own_files}"]) + "\n")
        return tmp_path / "north.toml"

    return write


@pytest.mark.parametrize("kind", ["preferences", "conversations"])
def test_a_site_trains_on_its_own_records_and_on_all_of_them(place, tmp_path, kind):
    file, run, identity = read_site(place(kind, kind))
    source = open_model(run.model, tmp_path / "models", run.train.seed)

    own = SharedTexts(run, source, tmp_path / "own", lambda phase, count: None, own=file.own_data(run.data))
    shared = SharedTexts(run, source, tmp_path / "shared", lambda phase, count: None)

    texts = [one.share_of(identity.name) for one in (own, shared)]
    backend = own.corpus.tokenizer_path.read_text()
    vocabulary = json.loads(backend)["model"]["vocab"]
    known = {vocabulary[letter]: letter for letter in "QZ"}
    seen = [
        {known[token] for token in data.loader.next_batch().input_ids.flatten().tolist() if token in known}
        for data in texts
    ]
    assert seen == [{"Z"}, {"Q"}]
    assert texts[0].digest != texts[1].digest
    # a share is a third, and own files are whole
    assert texts[0].num_sequences > 2 * texts[1].num_sequences


def test_a_further_run_from_a_sites_directory_neither_reads_nor_removes_the_personal_weights_of_the_first(
    place, tmp_path
):
    path, run_file = place("conversations", "conversations"), tmp_path / "run.toml"
    personal = run_file.read_text().replace('pki = "p"\n', 'pki = "p"\npersonal = ["*ln_f*"]\n')
    steps = tomllib.loads(personal)["train"]["steps"]

    def train_rounds(text, numbers):
        run_file.write_text(text)
        file, run, identity = read_site(path)
        terms = terms_of(run, identity, tmp_path / "keys")
        with _open_site(file, run, identity, terms, lambda line: None) as site:
            start = site._trainer._model.copy_weights()
            return [site._trainer.train_round(number, start, 0.1, PlainRule(None, start)).loss for number in numbers]

    train_rounds(personal, (1, 2, 3))
    kept = {file: file.read_bytes() for file in (tmp_path / "keys" / "north" / "state").rglob("round-*.safetensors")}
    further = personal.replace(f"steps = {steps}", f"steps = {steps + 1}")
    losses = train_rounds(further, (3,))

    # as at a site that has taken part in no other run, which was asked first in its third round
    assert kept and all(file.read_bytes() == data for file, data in kept.items())
    (tmp_path / "keys" / "north" / "state").rename(tmp_path / "elsewhere")
    assert losses == train_rounds(further, (3,))


@pytest.mark.slow
def test_a_further_run_from_a_sites_directory_has_a_pipeline_of_its_own(place, tmp_path):
    path, run_file = place("conversations", "conversations"), tmp_path / "run.toml"
    stages = "[pipeline]\nstages = 3\n[guard]\nshadow = 'lockstep'\nkeep_states = 0\n"
    first = run_file.read_text() + stages
    further = first.replace("lr = 1e-2", "lr = 2e-2")
    assert further != first

    def train_round(text):
        run_file.write_text(text)
        file, run, identity = read_site(path)
        with _open_site(file, run, identity, terms_of(run, identity, tmp_path / "keys"), lambda line: None) as site:
            modules = site._trainer._modules.trained_parameters
            start = {name: parameter.detach().clone() for name, parameter in modules.items()}
            rate = learning_rate(run.optimizer, 0, run.train.steps)
            site._trainer.train_round(1, start, rate, PlainRule(None, start))

    train_round(first)
    train_round(further)

    logs = [log.read_text() for log in (tmp_path / "keys" / "north" / "state").rglob("pipeline/events.jsonl")]
    assert [log.count('"kind":"run_started"') for log in logs] == [1, 1]


def test_the_reference_of_pairs_is_at_the_site_that_has_them(place, tmp_path):
    file, run, identity = read_site(place("preferences", "preferences"))
    source = open_model(run.model, tmp_path / "models", run.train.seed)
    own = SharedTexts(run, source, tmp_path / "own", lambda phase, count: None, own=file.own_data(run.data))

    data = own.share_of(identity.name)

    (kept,) = (tmp_path / "own").glob("reference-*.safetensors")
    written = kept.stat().st_mtime_ns
    # it is read, and not computed again, when the site's process begins anew
    again = own.share_of(identity.name)
    assert again.digest == data.digest and kept.stat().st_mtime_ns == written
    assert float(data.loader.next_batch().extras["reference"].max()) < 0


@pytest.mark.parametrize(
    ("kind", "own", "tokenizer", "words"),
    [
        ("preferences", "conversations", None, "conversations need a run with data.conversations .* and no data.conv"),
        ("conversations", "preferences", None, "preferences need a run with data.preferences"),
        (
            "preferences",
            "preferences",
            '{ kind = "bpe", vocab_size = 300 }',
            'a tokenizer that all sites have; but .* has data.tokenizer.kind = "bpe"',
        ),
    ],
)
def test_records_of_another_kind_or_without_a_common_tokenizer_are_refused(place, kind, own, tokenizer, words):
    with pytest.raises(ConfigError, match=words):
        read_site(place(kind, own, tokenizer=tokenizer))
