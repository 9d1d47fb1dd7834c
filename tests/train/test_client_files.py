"""A client's file, its run file and its texts: what is refused before anything is called, and what is drawn."""

import json

import pytest
import torch
from test_own_labelled_texts import TEXT, write_texts

from phalanx.data import BpeConfig
from phalanx.data.loader import BatchLoader
from phalanx.data.tokenizers import train_bpe
from phalanx.errors import CertificateError, CheckpointError, ConfigError, DataError
from phalanx.models import ModelSource, open_model
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.security.tee import Binding, inspect_evidence, parse_evidence
from phalanx.split.hardware.measure import measure_code
from phalanx.train import load_run
from phalanx.train.batches.labelled import ClientTexts as LocalTexts
from phalanx.train.batches.remote_turns import RemoteTurns
from phalanx.train.batches.scores import Scores
from phalanx.train.parties.client_file import read_client
from phalanx.train.parties.client_texts import ClientDraws, read_texts, tokenizer_digest
from phalanx.train.parties.enclave_process import EnclaveStart, read_enclave_run

SPLIT = """
remote_clients = ["north", "south"]
remote_enclave = "localhost:7071"
pki = "PKI"
"""
TPM = {"cut = 1": 'cut = 1\ntier = "tpm"', "allow_insecure_sim = true": ""}
HALF = {SPLIT.split("\n")[1]: "", 'remote_enclave = "localhost:7071"': "", "clients = 2": "clients = 1"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    home = tmp_path_factory.mktemp("keys")
    create_authority(home)
    for name in ("owner", "enclave", "north", "south", "mallory"):
        issue_certificate(home, name)
    return home


@pytest.fixture
def make(tmp_path, keys):
    """Writes a client file and its run file; returns the client file's path."""
    write_texts(tmp_path)
    texts = (json.loads(line)["note"] for line in (tmp_path / "0.jsonl").read_text().splitlines())
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(texts, BpeConfig(vocab_size=262)).to_json())
    kept = [line for line in TEXT.splitlines() if not line.startswith(("train = ", "test = "))]
    text = "\n".join(kept).replace(
        '{ kind = "bpe", vocab_size = 260 }', f'{{ kind = "file", path = "{tmp_path}/tokenizer.json" }}'
    )

    def write(run_changes=None, client_changes=None, who="north", without=()):
        run = text + SPLIT.replace("PKI", str(keys))
        for old, new in (run_changes or {}).items():
            assert old in run
            run = run.replace(old, new)
        (tmp_path / "run.toml").write_text(run)
        client = {
            "run": str(tmp_path / "run.toml"),
            "identity": str(keys / who),
            "train": str(tmp_path / "0.jsonl"),
            "test": str(tmp_path / "0.test.jsonl"),
            "directory": str(tmp_path / "own"),
            "allow_insecure_sim": True,
            **(client_changes or {}),
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in client.items() if name not in without]
        (tmp_path / "client.toml").write_text("\n".join(lines) + "\n")
        return tmp_path / "client.toml"

    return write


def test_a_client_reads_its_own_name_and_the_runs_classes(make):
    client, run, name = read_client(make())

    assert name == "north"
    assert client.text_columns(run).classes == ("flu", "cold")
    assert run.split.client_names == ("north", "south")
    assert read_client(make(client_changes={"text": "note", "label": "diagnosis"}))[2] == "north"


@pytest.mark.parametrize(
    ("run_changes", "client_changes", "who", "without", "error", "named"),
    [
        ({}, {}, "mallory", (), ConfigError, r"'mallory', which is not a client of .*run\.toml.*\n?.*north, south"),
        ({}, {}, "north", ("allow_insecure_sim",), ConfigError, "proves nothing to this client"),
        (TPM, {}, "north", (), ConfigError, "policy: missing"),
        ({}, {"policy": "policy.toml"}, "north", (), ConfigError, "not allowed with a policy file"),
        ({}, {"policy": "nowhere.toml"}, "north", ("allow_insecure_sim",), ConfigError, "nowhere.toml"),
        ({}, {"train": "nowhere.csv"}, "north", (), DataError, "nowhere.csv: is not a file"),
        ({}, {"label": "class"}, "north", (), DataError, r"0\.jsonl, line 1: no column 'class'"),
        ({'["flu", "cold"]': '["flu", "fever"]'}, {}, "north", (), DataError, "label 'cold' is not among the classes"),
        ({}, {"identity": "nowhere"}, "north", (), CertificateError, "nowhere"),
        ({}, {"labels": "x"}, "north", (), ConfigError, "did you mean 'label'"),
        (HALF, {}, "north", (), ConfigError, "but remote_clients, remote_enclave is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_called(make, run_changes, client_changes, who, without, error, named):
    with pytest.raises(error, match=named):
        read_client(make(run_changes, client_changes, who, without))


PROVES = """
[split.client_policies.north]
allow_insecure_sim = true
[split.client_policies.north.sim]
measurements.code = ["CODE"]
"""


def proving(keys):
    """A run file with a policy for north."""
    return {SPLIT.replace("PKI", str(keys)): SPLIT.replace("PKI", str(keys)) + PROVES.replace("CODE", "ab" * 32)}


@pytest.mark.parametrize(
    ("client_changes", "named"),
    [
        ({}, 'attester: missing; the run file has a policy for north.*set attester = "sim"'),
        ({"attester": "tpm"}, 'attester: "tpm"; the run file'),
        ({"attester": "tmp"}, "attester"),
        ({"attester": "az-snp-vtpm"}, "attester"),
    ],
)
def test_a_client_that_cannot_bring_the_evidence_that_is_asked_for_is_told_before_it_calls(
    make, keys, client_changes, named
):
    with pytest.raises(ConfigError, match=named):
        read_client(make(proving(keys), client_changes))


def test_endorsements_go_with_evidence_of_hardware_alone(make, tmp_path):
    path = make()
    path.write_text(path.read_text() + '\n[endorsements]\nchain = "chain.pem"\n')

    with pytest.raises(ConfigError, match="endorsements: they accompany evidence of hardware"):
        read_client(path)


def test_a_client_brings_evidence_of_this_very_program_or_says_what_is_missing(make, keys, tmp_path):
    client, run, name = read_client(make(proving(keys), {"attester": "sim"}))
    binding = Binding(b"\1" * 32, b"\2" * 32, b"\3" * 32, "client")

    evidence = parse_evidence(client.sign_evidence(binding, load_identity(keys / name)))

    assert inspect_evidence(evidence) == {"code": measure_code().hex()}
    assert run.split.client_policies["north"].evidence_kinds == ("sim",)
    bare = client.model_copy(update={"attester": None})
    with pytest.raises(ConfigError, match="attester: missing"):
        bare.sign_evidence(binding, load_identity(keys / name))
    hardware = client.model_copy(update={"attester": "tpm", "endorsements": {"chain": str(tmp_path / "no.pem")}})
    with pytest.raises(ConfigError, match=r"no\.pem: cannot be read"):
        hardware.sign_evidence(binding, load_identity(keys / name))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"clients = 2": "clients = 3"}, "as many different names as clients = 3"),
        ({'["north", "south"]': '["north", "north"]'}, "as many different names"),
        ({'["north", "south"]': '["north", "owner"]'}, "neither owner nor enclave"),
        ({'["north", "south"]': '["north", "South"]'}, "remote_clients.1"),
        ({"cut = 1": 'cut = 1\nmode = "plaintext"\ninsecure = true', "allow_insecure_sim = true": ""}, "cross sealed"),
        ({"cut = 1": 'cut = 1\ntier = "auto"'}, "name the tier of the remote one"),
        ({"localhost:7071": "enclave.example.org:7071"}, "a simulated enclave is reachable on this machine only"),
        ({"localhost:7071": "localhost"}, "remote_enclave"),
        ({'label = "diagnosis"': 'label = "diagnosis"\ntrain = "a.csv"\ntest = "b.csv"'}, "has train and test files"),
        ({SPLIT: ""}, "has no train and test files"),
    ],
)
def test_a_run_file_that_cannot_be_one_of_remote_clients_is_refused(make, keys, changes, named):
    with pytest.raises(ConfigError, match=named):
        read_client(make({old.replace("PKI", str(keys)): new for old, new in changes.items()}))


def test_a_tokenizer_that_needs_everybodys_texts_is_refused(make, tmp_path):
    old = f'{{ kind = "file", path = "{tmp_path}/tokenizer.json" }}'

    with pytest.raises(ConfigError, match=r'data\.tokenizer\.kind = "model" or "file"'):
        read_client(make({old: '{ kind = "bpe", vocab_size = 260 }'}))


def test_the_digest_of_a_split_without_remote_parties_is_what_it_was(tmp_path):
    write_texts(tmp_path)
    (tmp_path / "run.toml").write_text(TEXT.replace("FOLDER", str(tmp_path)))

    written = load_run(tmp_path / "run.toml").model_dump(mode="json")["split"]

    assert not {"remote_clients", "remote_enclave", "pki"} & set(written)


def test_only_the_enclaves_own_keys_serve_it(make, keys, tmp_path):
    make()

    assert read_enclave_run(tmp_path / "run.toml", EnclaveStart(keys / "enclave", tmp_path / "e")).split.remote_enclave
    with pytest.raises(CertificateError, match="belongs to 'north'"):
        read_enclave_run(tmp_path / "run.toml", EnclaveStart(keys / "north", tmp_path / "e"))
    make(
        {
            SPLIT.replace("PKI", str(keys)): "",
            'label = "diagnosis"': 'label = "diagnosis"\ntrain = ["a.csv", "b.csv"]\ntest = ["c.csv", "d.csv"]',
        }
    )
    with pytest.raises(ConfigError, match="starts the enclave of such a run"):
        read_enclave_run(tmp_path / "run.toml", EnclaveStart(keys / "enclave", tmp_path / "e"))


@pytest.fixture
def opened(make, tmp_path) -> tuple[object, object, ModelSource]:
    client, run, _ = read_client(make())
    client.state_directory.mkdir(mode=0o700)
    return client, run, open_model(run.model, tmp_path / "models", run.train.seed)


def test_a_clients_draws_are_those_of_a_run_that_plays_it_whatever_was_drawn_before(opened):
    client, run, source = opened
    texts = read_texts(client, run, "south", source, print).draws
    loader = BatchLoader(LocalTexts(texts._train.rows), 4, run.train.seed)

    local = [loader.next_batch() for _ in range(9)]

    assert texts.own_microbatches == (1, 3)
    for draw in (8, 0, 5):
        ids = torch.cat([ids for ids, *_ in texts.draw_rows(draw)])
        assert torch.equal(ids, local[draw].input_ids)
    assert sum(ids.shape[0] for ids, *_ in texts.held_out()) == 11


def test_a_commitment_is_the_same_after_a_restart_and_tells_nothing_without_its_secret(opened, tmp_path):
    client, run, source = opened
    texts = read_texts(client, run, "north", source, print).draws
    first = texts.texts_commitment(client.state_directory)
    (tmp_path / "elsewhere").mkdir(mode=0o700)

    assert read_texts(client, run, "north", source, print).draws.texts_commitment(client.state_directory) == first
    assert texts.texts_commitment(tmp_path / "elsewhere") != first
    assert (client.state_directory / "commitment.key").stat().st_mode & 0o777 == 0o600
    other = ClientDraws(texts._test, texts._train, (0,), 2, 0)
    assert other.texts_commitment(client.state_directory) != first
    assert len(tokenizer_digest(run, source)) == 64


def test_a_run_that_goes_on_is_bound_to_the_texts_that_clients_had():
    turns = RemoteTurns(8, 4)
    turns.take_commitments({"north": "aa", "south": "bb"})
    assert [turns.next_batch().input_ids.shape for _ in range(3)][-1] == (8, 4)
    state = json.loads(json.dumps(turns.position_state()))

    again = RemoteTurns(8, 4)
    again.load_position(state)

    assert (again.drawn, again.position_state()) == (3, state)
    again.take_commitments({"north": "aa", "south": "bb"})
    with pytest.raises(CheckpointError, match="south: its texts changed"):
        again.take_commitments({"north": "aa", "south": "cc"})
    for broken in ({}, {"draws": -1, "clients": {}}, {"draws": True, "clients": {}}, {"draws": 1, "clients": []}):
        with pytest.raises(CheckpointError):
            again.load_position(broken)
    with pytest.raises(DataError):
        again.validation_batch([0])


def test_scores_of_counts_are_those_of_the_answers_themselves():
    predicted, true = [0, 1, 1, 2, 0], [0, 1, 2, 2, 1]
    counts = [
        (true.count(k), predicted.count(k), sum(p == t == k for p, t in zip(predicted, true, strict=True)))
        for k in range(4)
    ]

    assert Scores.from_counts(2.5, counts) == Scores.from_predictions(2.5, predicted, true, 4)
    with pytest.raises(DataError):
        Scores.from_counts(0.0, [(0, 0, 0)])
