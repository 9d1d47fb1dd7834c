"""Documents of a dataset as text again: its own tokenizer decodes what its shards hold."""

import hashlib
from collections.abc import Iterator
from typing import Any

import tokenizers

from phalanx.data.build.encoding import TOKENIZER
from phalanx.data.build.look import draw_documents, read_tokens
from phalanx.data.shards import Dataset
from phalanx.errors import DataError


def check_tokenizer(dataset: Dataset) -> None:
    """Compare the tokenizer beside the shards with the one that made the tokens.

    Raises:
        DataError: It is another one, or cannot be read.
    """
    _tokenizer_bytes(dataset)


def _tokenizer_bytes(dataset: Dataset) -> bytes:
    path = dataset.directory / TOKENIZER
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); restore it from a copy") from exc
    expected = dataset.manifest.tokenizer.digest
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(
            f"{path}: has SHA-256 {found[:16]}..., the tokens were made with {expected[:16]}...; restore it from a copy"
        ).about(code="PHX-I027", file=str(path))
    return content


def sampled_documents(dataset: Dataset, count: int, seed: int, group: str | None) -> Iterator[dict[str, Any]]:
    """Yield documents drawn at random, with their texts.

    Raises:
        DataError: A file of the dataset is not the one that was signed, or there is no such group.
    """
    backend = tokenizers.Tokenizer.from_str(_tokenizer_bytes(dataset).decode())
    for place in draw_documents(dataset, count, seed, group):
        entry = dataset.document(place.group, place.split, place.number)
        *ids, _ = read_tokens(dataset, place)
        yield {
            "document": entry.name,
            "source": dataset.manifest.sources[entry.source].name,
            "place": f"{place.group}.{place.split}, document {place.number}",
            "digest": entry.digest,
            "fields": dict(entry.fields),
            "tokens": len(ids),
            "text": backend.decode(ids, skip_special_tokens=False),
        }
