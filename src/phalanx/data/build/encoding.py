"""Documents of a finished piece to tokens: the split by content and seed, the vocabulary, and encoded pieces."""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.data.build.passes import code_digest, tool_versions
from phalanx.data.build.recipe import DataRecipe, OutputConfig
from phalanx.data.build.records import RecordFile, RecordWriter
from phalanx.data.build.store import work_key
from phalanx.data.config import FileTokenizerConfig
from phalanx.data.pack import batch_texts, token_dtype
from phalanx.data.shards import document_digest
from phalanx.data.sources import Document
from phalanx.data.tokenizers import Encoder, load_tokenizer

TOKENS, ENTRIES, TOKENIZER, EOS = "tokens", "entries", "tokenizer.json", "end_of_text"
Split = Literal["train", "validation"]


def split_of(digest: str, output: OutputConfig) -> Split:
    """Return where a document goes: by its content and the seed alone, so that others move no document across."""
    draw = hashlib.sha256(f"split {output.seed} ".encode() + bytes.fromhex(digest)).digest()
    return "validation" if int.from_bytes(draw[:8], "big") < output.validation_share * 2**64 else "train"


def training_texts(documents: Iterable[Document], output: OutputConfig) -> Iterator[str]:
    """Yield the texts of the training split."""
    for document in documents:
        if split_of(document_digest(document.text), output) == "train":
            yield document.text


def encoding_key(recipe: DataRecipe, task: dict[str, Any]) -> str:
    """Return the name of an encoded piece."""
    return work_key(
        {
            "act": "encode",
            "input": task["input"],
            "tokenizer": task["tokenizer"],
            "validation_share": recipe.output.validation_share,
            "seed": recipe.output.seed,
            "versions": tool_versions(),
            "code": code_digest(),
        }
    )


def encode_piece(
    directory: Path, documents: Iterable[Document], encoder: Encoder, output: OutputConfig
) -> dict[str, Any]:
    """Write tokens and entries of the documents of one piece; one batch of texts is in memory at a time.

    Raises:
        DataError: The tokenizer gives no token for a text, or gives the token that ends documents.
    """
    tokenizer = encoder.tokenizer
    dtype = np.dtype(token_dtype(tokenizer.vocab_size))
    tokens = 0
    with (directory / TOKENS).open("wb") as stream, RecordWriter(directory / ENTRIES) as entries:
        for batch in batch_texts(documents):
            for document, ids in zip(batch, encoder.encode_batch([document.text for document in batch]), strict=True):
                stream.write(np.append(ids, tokenizer.eos_id).astype(dtype).tobytes())
                entries.append_record(json.dumps(_document_entry(document, len(ids) + 1, output)).encode())
                tokens += len(ids) + 1
    return {"tokens": tokens, "dtype": dtype.str}


def _document_entry(document: Document, tokens: int, output: OutputConfig) -> dict[str, Any]:
    digest = document_digest(document.text)
    fields: dict[str, str | int | float] = dict(document.fields)
    if document.origin is not None:
        optional_fields: dict[str, str | int | None] = {
            "raw_bytes": document.origin.raw_bytes,
            "raw_digest": document.origin.raw_digest,
            "url": document.origin.url,
            "fetched_at": document.origin.fetched_at,
        }
        fields |= {name: value for name, value in optional_fields.items() if value is not None}
    fields["text_bytes"] = len(document.text.encode())
    return {
        "digest": digest,
        "split": split_of(digest, output),
        "name": document.name,
        "fields": fields,
        "tokens": tokens,
    }


def encoded_documents(directory: Path, dtype: str) -> Iterator[tuple[dict[str, Any], NDArray[Any]]]:
    """Yield entry and tokens of each document of an encoded piece."""
    with (directory / TOKENS).open("rb") as stream:
        for record in RecordFile(directory / ENTRIES):
            entry = json.loads(record)
            yield entry, np.frombuffer(stream.read(entry["tokens"] * np.dtype(dtype).itemsize), dtype)


@functools.lru_cache(maxsize=1)
def encoder_of(home: Path, size_bytes: int) -> Encoder:
    """Return the encoder of a vocabulary, made once in a process; processes are the threads of a build."""
    eos_token = (home / EOS).read_text(encoding="utf-8")
    tokenizer = load_tokenizer(FileTokenizerConfig(path=home / TOKENIZER, eos_token=eos_token), None)
    return Encoder(tokenizer, size_bytes, threads=1)
