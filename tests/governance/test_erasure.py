"""Erasure by replay: weights of a run that never had the document, bit for bit; and nothing finds it any more."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from phalanx.cli.outcome import run_command
from phalanx.data import BpeConfig
from phalanx.data.shards import (
    DatasetFacts,
    DatasetWriter,
    DocumentEntry,
    RecipeRecord,
    SourceFacts,
    TokenizerRecord,
    document_digest,
    fingerprint_of,
    open_dataset,
)
from phalanx.data.shards.erased import write_erased
from phalanx.data.shards.proof import check_proof, prove_document
from phalanx.data.tokenizers.training import train_bpe
from phalanx.errors import ConfigError, DataError
from phalanx.governance.erasure import Erasure
from phalanx.security.crypto import Identity
from phalanx.train import PastRun, load_run, train
from phalanx.verifier.shards import DatasetReader
from phalanx.verifier.shards import check_proof as check_alone
from tiny_run_file import tiny_run_file

SIGNER = Identity.without_certificate("signer")
TEXTS = [f"the hoplite number {n} holds {n * n} shields and {n + 7} spears" for n in range(60)]
SECRET = "zq xv kw jj zq vx qk wj xz qv kj zw vq xk jw qz"


def write_dataset(home: Path, texts: list[str], copies: int = 1) -> Path:
    tokenizer = train_bpe(iter(texts), BpeConfig(vocab_size=300))
    content = tokenizer.to_json()
    with DatasetWriter(home, "<u2", 500, 256) as writer:
        for number, text in enumerate(texts):
            (ids,) = tokenizer.encode_texts([text])
            split = "validation" if number % 5 == 4 else "train"
            for copy in range(copies if text == SECRET else 1):
                entry = DocumentEntry(document_digest(text), 0, f"hoplite/{number}.{copy}", {"words": len(text)})
                writer.part_writer("all", split).add_document(np.array([*ids, tokenizer.eos_id]), entry)
        record = TokenizerRecord(
            kind="bpe", vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, digest=_sha256(content)
        )
        facts = DatasetFacts(
            sources=(SourceFacts(name="made", kind="text", fingerprint="1" * 64),),
            tokenizer=record,
            recipe=RecipeRecord.from_content("made\n"),
        )
        writer.finish_dataset(facts, SIGNER)
    (home / "tokenizer.json").write_bytes(content)
    return home


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_run_file(path: Path, dataset: Path, packing: str, steps: int, every: int) -> Path:
    text = tiny_run_file(
        f"[pipeline]\nstages = 2\n\n[checkpoint]\nevery = {every}\nkeep = 20\n",
        steps=steps,
        validate_every=max(3, steps // 2),
    )
    made = 'sources = [{ kind = "python_manual" }]\ntokenizer = { kind = "bpe", vocab_size = 300 }\n'
    data = f'dataset = {{ path = "{dataset}", signer = "{fingerprint_of(SIGNER)}" }}\npacking = "{packing}"\n'
    text = text.replace(made, data).replace("validation_share = 0.2\nmax_documents = 12\n", "")
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("dataset") / "hoplites", TEXTS)


def test_an_erased_dataset_has_every_other_token_in_its_place(dataset: Path, tmp_path: Path) -> None:
    old, digest = open_dataset(dataset), document_digest(TEXTS[7])

    manifest = write_erased(old, {digest}, tmp_path / "without", SIGNER)

    new = open_dataset(tmp_path / "without", fingerprint_of(SIGNER))
    (place,) = check_proof(prove_document(old, digest), "proof").places
    before = old.tokens("all", "train")[:].copy()
    before[place.start : place.start + place.tokens] = manifest.tokenizer.eos_id
    assert (new.tokens("all", "train")[:] == before).all()
    assert (new.document_starts("all", "train") == old.document_starts("all", "train")).all()
    entry = new.document_entry("all", "train", place.document)
    assert (entry.name, entry.fields) == ("erased/0", {"words": len(TEXTS[7])})
    assert [(parent.digest, parent.relation) for parent in manifest.parents] == [(old.digest, "erased")]
    # a stranger checks the whole data set, and that the document is not in it
    DatasetReader(tmp_path / "without", fingerprint_of(SIGNER)).check_all()
    proof = check_alone(prove_document(new, digest).to_bytes(), fingerprint_of(SIGNER))
    assert (proof.places, proof.is_complete) == ((), True)


def test_all_copies_of_a_document_are_erased_and_an_unknown_one_is_an_error(tmp_path: Path) -> None:
    home = write_dataset(tmp_path / "data", [*TEXTS[:9], SECRET, *TEXTS[10:14], SECRET], copies=3)
    old = open_dataset(home)
    assert len(check_proof(prove_document(old, document_digest(SECRET)), "").places) == 6

    write_erased(old, {document_digest(SECRET)}, tmp_path / "without", SIGNER)

    new = open_dataset(tmp_path / "without")
    assert not check_proof(prove_document(new, document_digest(SECRET)), "").places
    with pytest.raises(DataError, match="none of the documents"):
        write_erased(old, {document_digest("unknown")}, tmp_path / "again", SIGNER)
    assert not (tmp_path / "again" / "dataset.json").exists()


def tensors_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """All weights and moments of the newest checkpoint."""
    checkpoint = PastRun(run_dir).open_verified()
    return {name: checkpoint.read_tensor(name) for name in checkpoint.stages_by_tensor()}


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_replayed_weights_are_those_of_a_run_that_never_had_the_document(
    packing: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    train(load_run(write_run_file(tmp_path / "run.toml", dataset, packing, 6, 1)), tmp_path / "old")
    past = PastRun(tmp_path / "old")
    # a document that the first steps have not seen, so that a checkpoint is before it
    number = next(
        number
        for number in range(60)
        if number % 5 != 4 and (Erasure(past, f"hoplite/{number}.0").estimate_price().first_step or 0) >= 2
    )
    price = Erasure(past, f"hoplite/{number}.0").estimate_price()
    capsys.readouterr()
    words = ["erase", f"hoplite/{number}.0", "--run", str(tmp_path / "old")]

    assert run_command([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["price"] == json.loads(json.dumps(price.to_json()))
    assert not (tmp_path / "new").exists()
    assert run_command([*words, "--data-out", str(tmp_path / "data"), "--out", str(tmp_path / "new")]) == 0

    record = json.loads((tmp_path / "new" / "erasure.json").read_bytes())
    assert (record["from_step"], record["first_step"]) == (price.from_step, price.first_step)
    assert 0 < price.from_step <= price.first_step
    never = load_run(tmp_path / "new" / "config.toml")
    train(never, tmp_path / "never")
    replayed, expected, old = (tensors_of(tmp_path / name) for name in ("new", "never", "old"))
    assert {name: tensor.dtype for name, tensor in replayed.items()} == {n: t.dtype for n, t in expected.items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in replayed.items())
    assert any(not torch.equal(tensor, old[name]) for name, tensor in replayed.items())
    digests = [PastRun(tmp_path / name).final_weights_digest for name in ("new", "never")]
    assert digests[0] == digests[1] == record["final_weights_digest"]
    assert "adopted" in (tmp_path / "new" / "events.jsonl").read_text()
    capsys.readouterr()
    assert run_command(["audit", "verify", str(tmp_path / "new")]) == 0


@pytest.mark.slow
def test_an_attack_that_found_the_document_is_at_chance_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank of the secret among 999 texts of its kind that nobody trained on; 1 is found, chance is anywhere."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    texts = [
        text for number, text in enumerate(TEXTS[:36]) for text in ((text, SECRET) if number % 2 == 0 else (text,))
    ]
    home = write_dataset(tmp_path / "data", texts)
    train(load_run(write_run_file(tmp_path / "run.toml", home, "concatenate", 150, 75)), tmp_path / "old")
    erasure = Erasure(PastRun(tmp_path / "old"), document_digest(SECRET))
    erasure.erase_document(tmp_path / "without", tmp_path / "new")

    before, after = (secret_rank(tmp_path / name, tmp_path / f"{name}-model") for name in ("old", "new"))

    # by chance the first has a probability of 1 in 1000, and the second of 19 in 20
    assert before == 1
    assert after > 50


def secret_rank(run_dir: Path, out: Path) -> int:
    """Return the rank of the secret's loss among permutations of its words."""
    from phalanx.serve import TextModel
    from phalanx.train import export_run

    export_run(PastRun(run_dir), out)
    words, generator = SECRET.split(), np.random.default_rng(5)
    others = [" ".join(generator.permutation(words)) for _ in range(999)]
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    losses = losses_of(TextModel(out), tokenizer, [SECRET, *others])
    return 1 + int((losses[1:] < losses[0]).sum())


def losses_of(model: Any, tokenizer: tokenizers.Tokenizer, texts: list[str]) -> torch.Tensor:
    """The loss of each text over its first 16 tokens, which is the model's window."""
    ids = torch.tensor([tokenizer.encode(text).ids[:16] for text in texts])
    with torch.inference_mode():
        logits = model.module(ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


@pytest.mark.slow
def test_of_runs_on_shards_only_those_with_the_document_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three constituents; the second has the document, and the third has it as well under another name."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    shards = {"a": TEXTS[:20], "b": [*TEXTS[20:40], TEXTS[50]], "c": [TEXTS[50], *TEXTS[40:50], *TEXTS[51:60]]}
    words = ["erase", document_digest(TEXTS[50])]
    for name, texts in shards.items():
        home = write_dataset(tmp_path / "data" / name, texts)
        train(load_run(write_run_file(tmp_path / f"{name}.toml", home, "concatenate", 2, 1)), tmp_path / name)
        words += ["--run", str(tmp_path / name)]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    places = ["--data-out", str(tmp_path / "without"), "--out", str(tmp_path / "new")]
    capsys.readouterr()

    # the first alone has it not, and a name is of one data set
    assert run_command([*words[:4], "--json"]) == 3
    assert run_command(["erase", "hoplite/3.0", *words[2:]]) == 2
    capsys.readouterr()
    assert run_command([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (sorted(answer["shards"]), answer["untouched"]) == (["b", "c"], ["a"])
    assert run_command([*words, *places]) == 0

    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["b", "c"]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    for name in ("b", "c"):
        record = json.loads((tmp_path / "new" / name / "erasure.json").read_bytes())
        assert record["run"] == PastRun(tmp_path / name).run_id
        train(load_run(tmp_path / "new" / name / "config.toml"), tmp_path / "never" / name)
        assert PastRun(tmp_path / "never" / name).final_weights_digest == record["final_weights_digest"]


def test_a_run_of_sources_is_refused_with_the_reason(tmp_path: Path) -> None:
    class FromSources:
        path = tmp_path
        config = load_run(_sources_file(tmp_path))

    with pytest.raises(ConfigError, match="trained from a data set"):
        Erasure(FromSources(), "anything")


def _sources_file(home: Path) -> Path:
    path = home / "sources.toml"
    path.write_text(tiny_run_file("[pipeline]\nstages = 2\n"))
    return path
