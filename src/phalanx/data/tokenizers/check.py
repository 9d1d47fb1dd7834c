"""Whether a vocabulary is fit for a run, and facts about it."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.data.chat.template import text_marks
from phalanx.data.config import FileTokenizerConfig, ModelTokenizerConfig
from phalanx.data.tokenizers.config import END_OF_TEXT
from phalanx.data.tokenizers.measure import measure_texts
from phalanx.data.tokenizers.probes import probe_texts
from phalanx.data.tokenizers.recipe import TOKENIZER_FILE
from phalanx.data.tokenizers.tiktoken_encoder import UnequalError, byte_alphabet, make_tiktoken_encoder
from phalanx.data.tokenizers.tokenizer import TextTokenizer, load_tokenizer, read_json, vocabulary_digest

_MARK = re.compile(r"<\|[a-zA-Z0-9_]{1,40}\|>|\[/?INST\]")
"""How marks are written in chat templates."""
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass
class TokenizerCheck:
    """What was found of one vocabulary.

    Attributes:
        refused: Reasons for which a run would refuse it, or go wrong; empty where it is fit.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def open_vocabulary(place: Path, eos_token: str | None = None) -> TextTokenizer:
    """Read a vocabulary as a run would.

    Args:
        place: A directory of the hub's layout, or a ``tokenizer.json``.
        eos_token: Ends a document; the directory's own when left out.
    """
    directory = place if place.is_dir() else place.parent
    if place.is_dir() or (directory / "tokenizer_config.json").is_file():
        return load_tokenizer(ModelTokenizerConfig(eos_token=eos_token), place)
    return load_tokenizer(FileTokenizerConfig(path=place, eos_token=eos_token or END_OF_TEXT), None)


def check_tokenizer(place: Path, texts: Iterable[tuple[str, str]] = (), eos_token: str | None = None) -> TokenizerCheck:
    """Check a vocabulary, and its encoding of texts.

    Args:
        place: A directory or a ``tokenizer.json``.
    """
    tokenizer = open_vocabulary(place, eos_token)
    directory = place if place.is_dir() else place.parent
    parts, backend = json.loads(tokenizer.to_json()), tokenizer.backend
    check = TokenizerCheck()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    check.facts = {
        "file": str(place / TOKENIZER_FILE if place.is_dir() else place),
        "kind": parts["model"]["type"],
        "vocab_size": len(vocabulary),
        "largest_id": tokenizer.vocab_size - 1,
        "unused_ids": tokenizer.vocab_size - len(set(vocabulary.values())),
        "vocabulary_digest": vocabulary_digest(tokenizer),
        "bytes_covered": _bytes_covered(parts),
        "end_of_text": backend.id_to_token(tokenizer.eos_id),
        "special_tokens": sorted(token["content"] for token in parts["added_tokens"] if token["special"]),
        **_describe_encoder(tokenizer),
    }
    _check_companions(directory, vocabulary, check)
    _check_special_ids(tokenizer, read_json(directory / "tokenizer_config.json"), check)
    _check_forgeries(tokenizer, check)
    _check_round_trips(tokenizer, texts, check)
    return check


def _bytes_covered(parts: Mapping[str, Any]) -> int:
    """Count the bytes that the vocabulary has tokens for; with all 256 it has tokens for every text."""
    model = parts["model"]
    tokens = model["vocab"]
    names = set(tokens) if isinstance(tokens, dict) else {piece for piece, _ in tokens}
    if model.get("byte_fallback"):
        return sum(f"<0x{byte:02X}>" in names for byte in range(256))
    cuts_bytes = '"ByteLevel"' in json.dumps(parts["pre_tokenizer"])
    return sum(character in names for character in byte_alphabet()) if cuts_bytes else 0


def _describe_encoder(tokenizer: TextTokenizer) -> dict[str, str]:
    try:
        make_tiktoken_encoder(tokenizer.backend)
    except UnequalError as exc:
        return {"encodes_by": "tokenizers", "because": str(exc)}
    return {"encodes_by": "tiktoken", "because": "its ids are proven equal"}


def _check_companions(directory: Path, vocabulary: Mapping[str, int], check: TokenizerCheck) -> None:
    """Compare what lies beside the file with the vocabulary: named tokens, a chat template, the model's size."""
    named, model = read_json(directory / "tokenizer_config.json"), read_json(directory / "config.json")
    for name in _NAMED:
        token = named.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        check.facts[name] = token if isinstance(token, str) else None
        if isinstance(token, str) and token not in vocabulary:
            check.refused.append(f"{name} is {token!r}, which the vocabulary lacks")
    template = named.get("chat_template")
    path = directory / "chat_template.jinja"
    if path.is_file():
        template = path.read_text(encoding="utf-8", errors="replace")
    check.facts["chat_template"] = template is not None
    if isinstance(template, str):
        # a model that was trained to read them as text, as Llama 2, has them in no file
        read_as_text = text_marks(directory)
        absent = sorted({mark for mark in _MARK.findall(template) if mark not in {*vocabulary, *read_as_text}})
        check.refused += [f"the chat template writes {mark!r}, which is no token" for mark in absent]
    embeddings = model.get("vocab_size")
    if isinstance(embeddings, int) and check.facts["largest_id"] >= embeddings:
        check.refused.append(
            f"its largest id is {check.facts['largest_id']}, but the model has {embeddings} embeddings"
        )


def _check_special_ids(tokenizer: TextTokenizer, named: Mapping[str, Any], check: TokenizerCheck) -> None:
    """Record the tokens that the tokenizer writes before a text, and differences between its settings and its file."""
    first = tokenizer.first_ids
    check.facts["texts_begin_with"] = tokenizer.beginning_tokens or None
    is_said = named.get("add_bos_token")
    if isinstance(is_said, bool) and is_said != bool(first):
        check.refused.append(
            f"tokenizer_config.json says add_bos_token = {str(is_said).lower()}, and tokenizer.json "
            f"{'writes no first token' if is_said else 'writes one'}: its base model may have been trained "
            "differently; save it again from transformers"
        )


def _check_forgeries(tokenizer: TextTokenizer, check: TokenizerCheck) -> None:
    end_token = check.facts["end_of_text"]
    for text in probe_texts((end_token,)):
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        if tokenizer.eos_id in ids:
            check.refused.append(f"the text that starts {text[:30]!r} gives the end-of-text token {end_token!r}")
            break


def _check_round_trips(tokenizer: TextTokenizer, texts: Iterable[tuple[str, str]], check: TokenizerCheck) -> None:
    figures = measure_texts({"": tokenizer}, (("", text) for _, text in texts)).get(("", ""))
    if figures is None:
        return
    check.facts |= {**figures.to_json(), "first_altered": figures.altered or None}
    if not figures.tokens:
        check.refused.append("the texts give no token")
