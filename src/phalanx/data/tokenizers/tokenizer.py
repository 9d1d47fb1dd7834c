"""Text to token ids, by a ``tokenizer.json`` that no text can make to give a special token."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from phalanx.config import canonical_json
from phalanx.data.borders import bare_encoder, border_of, special_ids_around
from phalanx.data.config import BpeConfig, FileTokenizerConfig, ModelTokenizerConfig, TokenizerConfig
from phalanx.data.manifest import TokenizerRecord
from phalanx.data.normal_form import check_text
from phalanx.data.phases import DatasetTokenizerConfig
from phalanx.data.sources.files import read_text
from phalanx.errors import ConfigError, DataError

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer that never lets a text forge the end of a document.

    Attributes:
        vocab_size: One more than the largest id.
        first_ids: What the tokenizer's own post-processor writes before a text, as Llama's, Gemma's and Mistral's do.
            Documents, prompts and labelled texts begin with it.
        last_ids: What it writes behind a text; stands behind labelled texts, which are whole, and behind no prompt.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    eos_id: int
    first_ids: tuple[int, ...] = ()
    last_ids: tuple[int, ...] = ()

    @property
    def beginning_tokens(self) -> str:
        """The tokens before every text, as their vocabulary writes them; empty where there are none."""
        return " ".join(self.backend.id_to_token(token_id) or str(token_id) for token_id in self.first_ids)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text alone, without special tokens."""
        for text in texts:
            check_text(text, "a text")
        encoded = [item.ids for item in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        for text, ids in zip(texts, encoded, strict=True):
            if not ids or self.eos_id in ids:
                raise unusable_error(text, num_tokens=len(ids))
        return encoded

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text that is to be continued, behind the tokenizer's first token."""
        return [*self.first_ids, *self.encode_texts([text])[0]]

    def encode_pair(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """Token ids of two texts as one, behind the tokenizer's first token, and how many are of the prompt alone.

        A token that reaches over the border is the answer's. Encoded apart, the two would have other ids than the text
        that a model goes on from, wherever a token reaches over the border or begins a text otherwise.

        Raises:
            DataError: They encode to the end-of-text token, or the answer to nothing.
        """
        encoding = self._bare_backend.encode(prompt + answer, add_special_tokens=False)
        ids, border = list(encoding.ids), border_of(encoding, prompt + answer, len(prompt))
        if border == len(ids) or self.eos_id in ids:
            raise unusable_error(prompt + answer, num_tokens=len(ids) - border)
        return [*self.first_ids, *ids], len(self.first_ids) + border

    def encode_whole(self, texts: Sequence[str], tokens: int) -> list[list[int]]:
        """Token ids of texts that are read as a whole, with what the tokenizer writes before and behind each.

        Args:
            tokens: At most so many of each; the text is cut off, and what is written around it is not.
        """
        room = max(tokens - len(self.first_ids) - len(self.last_ids), 0)
        rows = ([*self.first_ids, *ids[:room], *self.last_ids] for ids in self.encode_texts(texts))
        return [ids[:tokens] for ids in rows]

    @cached_property
    def _bare_backend(self) -> tokenizers.Tokenizer:
        return bare_encoder(self.backend, special_is_text=True)

    def to_json(self) -> bytes:
        """The content of ``tokenizer.json``."""
        return self.backend.to_str().encode()

    def manifest_record(self, kind: str) -> TokenizerRecord:
        """Return its record in a manifest; `kind` as in the run file."""
        digest = hashlib.sha256(self.to_json()).hexdigest()
        return TokenizerRecord(kind=kind, vocab_size=self.vocab_size, eos_id=self.eos_id, digest=digest)


LoadedTokenizerConfig = ModelTokenizerConfig | FileTokenizerConfig | DatasetTokenizerConfig
"""The tokenizers that no run trains."""


def load_tokenizer(config: LoadedTokenizerConfig, tokenizer_path: Path | None) -> TextTokenizer:
    """Read a ``tokenizer.json``.

    Args:
        tokenizer_path: The model's directory, or its ``tokenizer.json``; for kind "model" only.

    Raises:
        ConfigError: Kind "model", and the model has none; or kind "dataset", which is for a dataset alone.
        DataError: The file is missing or malformed, or no end-of-text token is known.
    """
    config = _require_file_config(config)
    path = locate_tokenizer(config, tokenizer_path)
    backend = _load_backend(path)
    eos_token = config.eos_token or _declared_eos(path.parent, backend)
    return wrap_backend(backend, eos_token, str(path))


def locate_tokenizer(config: LoadedTokenizerConfig, tokenizer_path: Path | None) -> Path:
    """The path of the ``tokenizer.json`` that the config means."""
    config = _require_file_config(config)
    if isinstance(config, FileTokenizerConfig):
        return config.path
    if tokenizer_path is None:
        raise ConfigError(
            "data.tokenizer.kind='model': the model has no tokenizer.json, nor vocab.json and merges.txt to make "
            "one from; `phalanx model import DIR OUT` converts other tokenizer files, or use kind='bpe' or 'file'"
        )
    return tokenizer_path / "tokenizer.json" if tokenizer_path.is_dir() else tokenizer_path


def original_tokenizer(config: TokenizerConfig, tokenizer_path: Path | None) -> Path | None:
    """The path of the ``tokenizer.json`` that was made elsewhere; None where it lies with the tokens of the run."""
    if isinstance(config, BpeConfig | DatasetTokenizerConfig):
        return None
    return locate_tokenizer(config, tokenizer_path)


def fingerprint_tokenizer(config: TokenizerConfig, tokenizer_path: Path | None) -> str:
    """SHA-256 in hex over everything that decides the token ids of a text, but the training split."""
    if isinstance(config, BpeConfig):
        special = "".join(f" {token}" for token in config.special_tokens)
        return hashlib.sha256(
            f"bpe {config.vocab_size} tokenizers {tokenizers.__version__}{special}".encode()
        ).hexdigest()
    backend = load_tokenizer(config, tokenizer_path)
    # nothing where there is none: what was made before documents began with it is then used as before
    first = f" begins with {backend.first_ids}" if backend.first_ids else ""
    return hashlib.sha256(backend.to_json() + f"{backend.eos_id}{first}".encode()).hexdigest()


def named_tokenizer(config: TokenizerConfig, tokenizer_path: Path | None) -> TextTokenizer | None:
    """Read the tokenizer that a run file names beside a dataset; None where it names none."""
    if isinstance(config, BpeConfig | DatasetTokenizerConfig):
        return None
    return load_tokenizer(config, tokenizer_path)


def end_of_text(path: Path, eos_id: int) -> str:
    """Return the token that ends texts, of which the number is known."""
    token = _load_backend(path).id_to_token(eos_id)
    if token is None:
        raise DataError(f"{path}: has no token {eos_id}, which ends texts; build the dataset again")
    return token


def open_tokenizer(path: Path, eos_id: int) -> TextTokenizer:
    """Read a ``tokenizer.json`` of which the number of the end-of-text token is known."""
    return wrap_backend(_load_backend(path), end_of_text(path, eos_id), str(path))


def vocabulary_digest(tokenizer: TextTokenizer) -> str:
    """SHA-256 in hex over what decides the ids of a text: vocabulary, merges, how text is cut, the end of text.

    A chat template, a decoder or a post-processor is no part of it: with another one, tokens mean the same. Nor is a
    setting that is left at nothing, so that a library that writes more of them changes no digest.
    """
    state = json.loads(tokenizer.to_json())
    added = [(token["id"], token["content"], token["special"]) for token in state["added_tokens"]]
    decided_by = {
        "format": "phalanx-vocabulary/1",
        "model": {name: value for name, value in state["model"].items() if value is not None},
        "normalizer": state["normalizer"],
        "pre_tokenizer": state["pre_tokenizer"],
        "added_tokens": sorted(added),
        "end_of_text": tokenizer.eos_id,
    }
    return hashlib.sha256(canonical_json(decided_by)).hexdigest()


def unusable_error(text: str, num_tokens: int) -> DataError:
    """Describe the fault of a text's tokens: there is none, or one of them ends a document."""
    what = "the end-of-text token inside a document" if num_tokens else "no token at all"
    return DataError(f"tokenizer gave {what} for the document that starts {text[:40]!r}; use another one")


def wrap_backend(backend: tokenizers.Tokenizer, eos_token: str, where: str) -> TextTokenizer:
    """Return a tokenizer for whole documents, to which special tokens written in a text are text.

    Args:
        backend: Backend of the tokenizers library; truncation and padding are turned off.
    """
    eos_id = backend.token_to_id(eos_token)
    if eos_id is None:
        raise DataError(
            f"{where}: end-of-text token {eos_token!r} is not in the vocabulary; set eos_token to a token of it"
        )
    backend.no_truncation()
    backend.no_padding()
    # "<|endoftext|>" written in a document is text; else it would forge a document boundary
    backend.encode_special_tokens = True
    size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return TextTokenizer(backend, size, eos_id, *special_ids_around(backend))


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    text = read_text(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as exc:  # the library raises nothing more exact
        raise DataError(f"{path}: is not a tokenizer.json ({exc}); save it again from its model").with_facts(
            code="PHX-I016",
            file=str(path),
            key="data.tokenizer",
            found=str(exc),
            expected="a tokenizer.json",
            do="save it again from its model",
        ) from exc


def _require_file_config(config: LoadedTokenizerConfig) -> ModelTokenizerConfig | FileTokenizerConfig:
    if isinstance(config, DatasetTokenizerConfig):
        raise ConfigError('data.tokenizer: kind = "dataset" is only for data.dataset; use "model" or "file"')
    return config


def _declared_eos(directory: Path, backend: tokenizers.Tokenizer) -> str:
    token = read_json(directory / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        number = read_json(directory / "config.json").get("eos_token_id")
        token = backend.id_to_token(number) if isinstance(number, int) and number >= 0 else None
    if not isinstance(token, str):
        raise DataError(f"{directory}: has no end-of-text token; set data.tokenizer.eos_token")
    return token


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file beside a tokenizer; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as exc:
        raise DataError(f"{path}: is not JSON ({exc}); save it again from its model") from exc
    if not isinstance(content, dict):
        raise DataError(f"{path}: found a JSON {type(content).__name__}, expected an object")
    return content
