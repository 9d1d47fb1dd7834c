"""``phalanx data export`` and ``import``: a dataset goes to other tools' files and comes back with the same tokens."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

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
    open_dataset,
)
from phalanx.data.tokenizers.training import train_bpe
from phalanx.security.crypto import Identity

TEXTS = [f"the hoplite number {number} holds {number * number} shields" for number in range(20)]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    home = tmp_path / "made"
    tokenizer = train_bpe(iter(TEXTS), BpeConfig(vocab_size=270))
    content = tokenizer.to_json()
    record = TokenizerRecord(
        kind="bpe",
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        digest=hashlib.sha256(content).hexdigest(),
    )
    with DatasetWriter(home, "<u2") as writer:
        for number, ids in enumerate(tokenizer.encode_texts(TEXTS)):
            entry = DocumentEntry(document_digest(TEXTS[number]), 0, str(number))
            split = "validation" if number % 5 == 4 else "train"
            writer.part_writer("web", split).add_document(np.array([*ids, tokenizer.eos_id]), entry)
        sources = (SourceFacts(name="made", kind="text", fingerprint="1" * 64),)
        facts = DatasetFacts(sources=sources, tokenizer=record, recipe=RecipeRecord.from_content(""))
        writer.finish_dataset(facts, Identity.without_certificate("signer"))
    (home / "tokenizer.json").write_bytes(content)
    return home


@pytest.mark.parametrize(("kind", "ending"), [("parquet", "parquet"), ("megatron", "idx")])
def test_what_is_exported_is_imported_with_the_same_tokens(
    made: Path, tmp_path: Path, capsys, kind: str, ending: str
) -> None:
    again, files, key = str(tmp_path / "again"), tmp_path / "files", str(tmp_path / "keys" / "key")
    before = open_dataset(made)
    eos = str(before.manifest.tokenizer.eos_id)
    names = [str(files / f"web.{split}.{ending}") for split in ("train", "validation")]

    assert run_command(["data", "export", str(made), str(files), "--to", kind]) == 0
    tokenizer = ["--tokenizer", str(made / "tokenizer.json"), "--eos-id", eos]
    capsys.readouterr()
    assert run_command(["data", "import", again, *names, *tokenizer, "--signing-key", key, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)

    after = open_dataset(Path(again), answer["signed by"])
    for split in ("train", "validation"):
        assert after.tokens("web", split)[:].tolist() == before.tokens("web", split)[:].tolist()
    assert after.manifest.tokenizer.digest == before.manifest.tokenizer.digest
    # nothing is written over
    assert run_command(["data", "export", str(made), str(files), "--to", kind]) == 3
    assert run_command(["data", "import", again, *names, *tokenizer, "--signing-key", key]) == 3
