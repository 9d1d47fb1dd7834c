"""The example of docs/shards.md, made by Phalanx from fixed keys; run as a program it writes it into the page."""

import base64
import json
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from phalanx.data.shards import (
    DatasetFacts,
    DatasetWriter,
    DocumentEntry,
    RecipeRecord,
    SealKey,
    SourceFacts,
    TokenizerRecord,
    document_digest,
    open_dataset,
)
from phalanx.data.shards.manifest import ParentRecord
from phalanx.data.shards.proof import prove_document
from phalanx.data.shards.seal import DatasetSeal
from phalanx.security.crypto import Identity

PAGE = Path(__file__).resolve().parents[2] / "docs" / "shards.md"
SIGNER = Identity("signer", Ed25519PrivateKey.from_private_bytes(b"\x01" * 32))
TEXTS = {"wörter": ("web", "train", 150), "mots": ("web", "train", 120), "words": ("books", "validation", 3)}


def vectors() -> dict:
    """Everything that the page shows."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        write_dataset(home)
        dataset = open_dataset(home)
        return {
            "files": {
                str(path.relative_to(home)): base64.b64encode(path.read_bytes()).decode()
                for path in sorted(home.rglob("*"))
                if path.is_file() and path.name != "dataset.json"
            },
            "dataset.json": (home / "dataset.json").read_text(encoding="utf-8"),
            "digest": dataset.digest,
            "documents": [
                {"text": text, "digest": document_digest(text), "group": group, "split": split, "tokens": _ids(size)}
                for text, (group, split, size) in TEXTS.items()
            ],
            "proofs": [
                json.loads(prove_document(dataset, document_digest(text)).to_bytes()) for text in ("mots", "parole")
            ],
            "encryption": _encryption(),
        }


def _ids(size: int) -> list[int]:
    return [1 + number * 7 % 98 for number in range(size - 1)] + [0]


def write_dataset(home: Path) -> None:
    """Write the dataset of the page."""
    facts = DatasetFacts(
        sources=(
            SourceFacts(name="site", kind="html", fingerprint="01" * 32, licence="CC-BY-4.0"),
            SourceFacts(name="notes", kind="text", fingerprint="02" * 32, consent="given in writing"),
        ),
        tokenizer=TokenizerRecord(kind="bpe", vocab_size=100, eos_id=0, digest="03" * 32),
        recipe=RecipeRecord.from_content('[[rules]]\nkind = "length"\n'),
        tools={"phalanx": "0.1.0"},
        parents=(ParentRecord(digest="04" * 32, signer="05" * 32, relation="filtered"),),
    )
    with DatasetWriter(home, "<u2", shard_tokens=200, leaf_bytes=256) as writer:
        for number, (text, (group, split, size)) in enumerate(TEXTS.items()):
            entry = DocumentEntry(document_digest(text), number % 2, f"{group}/{number}", {"score": number / 4})
            writer.part_writer(group, split).add_document(np.array(_ids(size)), entry)
        writer.finish_dataset(facts, SIGNER)


def _encryption() -> dict:
    seal, file, plain = DatasetSeal("04" * 16, b"\x03" * 32), "shards/web.train/tokens-00000", b"tokens of a leaf"
    with mock.patch("secrets.token_bytes", lambda size: b"\x06" * size):
        wrapped = seal.wrapped_key(SealKey(b"\x05" * 32))
    return {
        "data_key": "03" * 32,
        "seal": seal.seal_record().model_dump(mode="json"),
        "file": file,
        "leaf": 3,
        "plain": plain.hex(),
        "stored": seal.file_cipher(file).seal_leaf(3, plain).hex(),
        "wrapping_key": "05" * 32,
        "dataset.key.json": wrapped.decode(),
    }


def on_page() -> dict:
    """What the page has."""
    found: dict = json.loads(PAGE.read_text(encoding="utf-8").partition("```json\n")[2].partition("\n```")[0])
    return found


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8").partition("```json\n")[0]
    PAGE.write_text(f"{text}```json\n{json.dumps(vectors(), indent=1, ensure_ascii=False)}\n```\n", encoding="utf-8")
