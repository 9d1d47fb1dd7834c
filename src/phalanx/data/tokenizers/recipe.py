"""A vocabulary made from a recipe: sources, kind and size to a directory that a run can name."""

import importlib.metadata
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from phalanx.config import StrictModel, digest_config, dump_toml
from phalanx.data.sources import Source, SourceConfig, no_text, open_source
from phalanx.data.sources.listing import is_empty
from phalanx.data.tokenizers.config import TrainingConfig, WordPieceTraining
from phalanx.data.tokenizers.tokenizer import TextTokenizer, vocabulary_digest
from phalanx.data.tokenizers.training import train_tokenizer
from phalanx.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
_LIBRARIES = ("tokenizers", "sentencepiece")


class TokenizerRecipe(StrictModel):
    """What a vocabulary is made of.

    Attributes:
        sources: Text that it is trained on, read in this order.
        tokenizer: Its kind, size and tokens.
        max_documents: Stop after so many documents that are not empty.
    """

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    tokenizer: TrainingConfig
    max_documents: int | None = Field(default=None, ge=1)


@dataclass
class _SourceTexts:
    """The texts of all sources, counted while they are read."""

    sources: list[Source]
    max_documents: int | None
    documents: int = 0
    size_bytes: int = 0

    def read_texts(self) -> Iterator[str]:
        for source in self.sources:
            for document in source.documents():
                if self.max_documents is not None and self.documents >= self.max_documents:
                    return
                text = document.text.replace("\r\n", "\n").replace("\r", "\n").strip()
                if not text:
                    continue
                self.documents += 1
                try:
                    self.size_bytes += len(text.encode())
                except UnicodeEncodeError as exc:
                    raise DataError(f"{document.name}: holds a lone surrogate, which is not text; repair it") from exc
                yield text


def make_tokenizer(recipe: TokenizerRecipe, out: Path) -> dict[str, Any]:
    """Train a vocabulary and write it, with its recipe, to a new directory.

    Args:
        out: Gets ``tokenizer.json``, ``tokenizer_config.json``, ``recipe.toml`` and ``training.json``.

    Returns:
        The content of ``training.json``: digests, counts and library versions.

    Guarantees:
        Equal recipes, texts and library versions give the same bytes. A crash leaves no half-made directory.
    """
    if out.exists():
        raise DataError(f"{out}: already exists and is not overwritten; give another path").with_facts(file=str(out))
    for source in recipe.sources:
        if is_empty(getattr(source, "path", "")):
            raise no_text(source)
    texts = _SourceTexts([open_source(source) for source in recipe.sources], recipe.max_documents)
    fingerprints = [source.fingerprint() for source in texts.sources]
    stream = texts.read_texts()
    first_text = next(stream, None)
    if first_text is None:
        raise no_text(recipe.sources[0])
    tokenizer = train_tokenizer(itertools.chain((first_text,), stream), recipe.tokenizer)
    if [source.fingerprint() for source in texts.sources] != fingerprints:
        raise DataError(f"{out}: a file of the sources changed while it was read; run again")
    record = {
        "vocabulary_digest": vocabulary_digest(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "kind": recipe.tokenizer.kind,
        "recipe_digest": digest_config(recipe),
        "sources": fingerprints,
        "documents": texts.documents,
        "size_bytes": texts.size_bytes,
        "libraries": dict(_library_versions()),
    }
    try:
        _write_directory(out, tokenizer, recipe, record)
    except OSError as exc:
        raise DataError(f"{out}: cannot be written ({exc.strerror}); give another path").with_facts(
            file=str(out)
        ) from exc
    return record


def _write_directory(out: Path, tokenizer: TextTokenizer, recipe: TokenizerRecipe, record: dict[str, Any]) -> None:
    training = recipe.tokenizer
    named: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": training.end_of_text,
        "clean_up_tokenization_spaces": False,
    }
    named |= {"unk_token": training.unknown} if isinstance(training, WordPieceTraining) else {}
    named |= {"additional_special_tokens": list(training.special_tokens)} if training.special_tokens else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    spare = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out.parent))
    try:
        (spare / TOKENIZER_FILE).write_bytes(tokenizer.to_json())
        (spare / "tokenizer_config.json").write_text(_dump_json(named), encoding="utf-8")
        (spare / "recipe.toml").write_text(dump_toml(recipe), encoding="utf-8")
        (spare / "training.json").write_text(_dump_json(record), encoding="utf-8")
        spare.chmod(0o755)
        spare.rename(out)
    finally:
        shutil.rmtree(spare, ignore_errors=True)


def _dump_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _library_versions() -> Iterator[tuple[str, str]]:
    for name in _LIBRARIES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
