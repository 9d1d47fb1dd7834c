"""A tokenizer.json as the fields of a GGUF file, by which llama.cpp gives the same ids; refused where it would not."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from phalanx.data.borders import special_ids_around
from phalanx.data.tokenizers.patterns import GPT2, GPT2_DIGITS, LLAMA3, QWEN2
from phalanx.errors import ModelError

_SPACE = "▁"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens in llama.cpp."""
_PATTERNS = {GPT2: "gpt-2", GPT2_DIGITS: "smollm", LLAMA3: "llama-bpe", QWEN2: "qwen2"}
"""Names that llama.cpp has for the ways to cut a text into words."""
_UNIFORM_PATTERNS = {
    # as Qwen's and Llama's own files spell them
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+": "qwen2",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+": "llama-bpe",
}


@dataclass(frozen=True)
class GgufVocabulary:
    """What llama.cpp must be told of a vocabulary.

    Attributes:
        model: ``gpt2`` for bytes by merges, ``llama`` for SentencePiece's BPE.
        pre: Name of the rule that cuts a text into words before any merge.
        kinds: Kind of each token in llama.cpp's numbers.
        scores: Score of each token; empty for ``gpt2``.
        merges: Empty for ``llama``.
        adds_bos: Whether a text is encoded with the begin-of-text token before it.
        is_composing: Whether our tokenizer brings a text to the normal form NFC, which llama.cpp never does.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    bos_id: int | None = None
    eos_id: int | None = None
    adds_bos: bool = False
    adds_eos: bool = False
    adds_space: bool = False
    is_composing: bool = False
    unknown_id: int | None = None
    extra: Mapping[str, int] = field(default_factory=dict)


def read_vocabulary(path: Path, vocab_size: int, bos_id: int | None, eos_id: int | None) -> GgufVocabulary:
    """Read a tokenizer.json.

    Args:
        vocab_size: Rows of the model's embedding; ids that no token has get a name of their own.
        bos_id: Begin-of-text token by the model's config; the tokenizer's own frame counts before it.
        eos_id: End-of-text token by the model's config.

    Raises:
        ModelError: llama.cpp has no rule that gives the same ids; the text names the part of the tokenizer.
    """
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))
        model = parts["model"]
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises nothing narrower
        raise ModelError(f"{path}: no tokenizer.json that can be read: {exc}") from exc
    if model.get("type") != "BPE":
        raise ModelError(
            f"{path}: model.type: found {model.get('type')!r}; GGUF is written for BPE, by bytes or SentencePiece's; "
            "export the model as ONNX"
        )
    normalizers = _normalizers(parts.get("normalizer"))
    before, behind = special_ids_around(backend)
    if len(before) > 1 or len(behind) > 1:
        raise ModelError(f"{path}: writes {len(before)} tokens before a text and {len(behind)} behind; GGUF has one")
    by_bytes = not model.get("byte_fallback")
    read = _read_byte_level if by_bytes else _read_sentence_piece
    how, merges = read(parts, normalizers, path)
    tokens, kinds = _list_tokens(backend, parts["added_tokens"], vocab_size, path, by_bytes=by_bytes)
    unknown = model.get("unk_token")
    return GgufVocabulary(
        model="gpt2" if by_bytes else "llama",
        pre=how["pre"],
        tokens=tokens,
        kinds=kinds,
        scores=() if by_bytes else _scores(tokens, merges),
        merges=merges if by_bytes else (),
        bos_id=before[0] if before else bos_id,
        eos_id=behind[0] if behind else eos_id,
        adds_bos=bool(before),
        adds_eos=bool(behind),
        adds_space=how["adds_space"] == "yes",
        is_composing="NFC" in normalizers,
        unknown_id=None if unknown is None else backend.token_to_id(unknown),
    )


def _normalizers(part: Mapping[str, Any] | None) -> dict[str, Any]:
    """List the steps of a normalizer by kind."""
    if part is None:
        return {}
    steps = part["normalizers"] if part.get("type") == "Sequence" else [part]
    return {step["type"]: step for step in steps}


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part["pretokenizers"]) if part.get("type") == "Sequence" else [part]


def _read_byte_level(
    parts: Mapping[str, Any], normalizers: Mapping[str, Any], path: Path
) -> tuple[dict[str, str], list[str]]:
    """Find llama.cpp's name for the way a byte-level BPE cuts a text."""
    if set(normalizers) - {"NFC"}:
        raise ModelError(f"{path}: normalizer: {sorted(normalizers)}: llama.cpp normalizes no byte-level vocabulary")
    pre = None
    match _steps(parts.get("pre_tokenizer")):
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            pre = "gpt-2"
        case [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True, **rest}]:
            pre = None if rest.get("add_prefix_space") else "smollm"
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ]:
            pre = _PATTERNS.get(pattern) or _UNIFORM_PATTERNS.get(pattern)
    if pre is None:
        raise ModelError(
            f"{path}: pre_tokenizer: cuts a text in a way that llama.cpp has no name for here; known: "
            f"{', '.join(sorted(set(_PATTERNS.values())))}; export the model as ONNX"
        )
    return {"pre": pre, "adds_space": "no"}, _merges(parts, path)


def _read_sentence_piece(
    parts: Mapping[str, Any], normalizers: Mapping[str, Any], path: Path
) -> tuple[dict[str, str], list[str]]:
    """Check that a BPE with bytes as a last resort is SentencePiece's, with spaces as a mark."""
    steps = _steps(parts.get("pre_tokenizer"))
    has_metaspace = len(steps) == 1 and steps[0]["type"] == "Metaspace" and not steps[0].get("split", True)
    replaces = normalizers.get("Replace", {}).get("content") == _SPACE
    adds_space = "Prepend" in normalizers
    if has_metaspace:
        scheme = steps[0].get("prepend_scheme", "always")
        if scheme == "first":
            raise ModelError(f"{path}: pre_tokenizer: Metaspace with prepend_scheme 'first' has no form in GGUF")
        adds_space = scheme == "always"
    if set(normalizers) - {"Replace", "Prepend"} or bool(steps) != has_metaspace or replaces == has_metaspace:
        raise ModelError(
            f"{path}: is a BPE with bytes that is not as SentencePiece's own "
            f"(normalizer {sorted(normalizers)}, pre_tokenizer {[step['type'] for step in steps]}); export as ONNX"
        )
    return {"pre": "default", "adds_space": "yes" if adds_space else "no"}, _merges(parts, path)


def _merges(parts: Mapping[str, Any], path: Path) -> list[str]:
    model = parts["model"]
    if not model["merges"]:
        raise ModelError(f"{path}: model.merges: none; llama.cpp opens no vocabulary without merges")
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]


def _list_tokens(
    backend: tokenizers.Tokenizer,
    added: Sequence[Mapping[str, Any]],
    vocab_size: int,
    path: Path,
    *,
    by_bytes: bool,
) -> tuple[list[str], list[int]]:
    """Return spelling and kind of each id."""
    by_id = {number: token for token, number in backend.get_vocab(with_added_tokens=True).items()}
    if by_id and max(by_id) >= vocab_size:
        raise ModelError(f"{path}: has a token of id {max(by_id)}, but the model has {vocab_size} rows for tokens")
    declared = {entry["id"]: entry for entry in added}
    lax = [entry["content"] for entry in added if entry.get("lstrip") or entry.get("rstrip") or entry["single_word"]]
    if lax:
        raise ModelError(f"{path}: token {lax[0]!r} takes spaces beside it into itself, which GGUF has no form for")
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    kinds = [_NORMAL if number in by_id else _UNUSED for number in range(vocab_size)]
    for number, entry in declared.items():
        kinds[number] = _CONTROL if entry["special"] else _USER_DEFINED
    if not by_bytes:
        for number, token in by_id.items():
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                kinds[number] = _BYTE
            elif token == "<unk>":  # noqa: S105 - the name of a token
                kinds[number] = _UNKNOWN
    return tokens, kinds


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Return scores by which SentencePiece's search joins the same pairs as the merges, first merge first."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), number)
    return [-float(rank.get(token, len(merges))) for token in tokens]
