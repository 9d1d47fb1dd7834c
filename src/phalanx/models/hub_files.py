"""The files that lie beside the weights of a directory in the hub's layout: tokenizer, chat template, generation."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from phalanx.errors import ModelError
from phalanx.models.cache import written_once
from phalanx.models.directory import SLOW_BPE, TOKENIZER
from phalanx.models.quiet import quiet_transformers
from phalanx.planner.model.families import FAMILIES

GENERATION = "generation_config.json"
_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_CLASSES = {
    "next": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "hidden": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "target": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
_TEMPLATES = "additional_chat_templates"
_ROTARY_PCT = frozenset({"cohere2", "gpt_neox"})
"""Families with another name for the share of a head that is rotated."""


def tokenizer_companions(directory: Path) -> Iterator[Path]:
    """List the files beside a tokenizer.json that say what its special tokens are and how a chat is written."""
    for name in _COMPANIONS:
        if (directory / name).is_file():
            yield directory / name
    yield from sorted((directory / _TEMPLATES).glob("*.jinja"))


def copy_tokenizer(tokenizer: Path, target: Path) -> None:
    """Copy a tokenizer.json and its companions into a directory."""
    shutil.copyfile(tokenizer, target / TOKENIZER)
    for path in tokenizer_companions(tokenizer.parent):
        place = target / path.relative_to(tokenizer.parent)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, place)


def find_tokenizer(directory: Path, cache_dir: Path) -> Path | None:
    """Return a directory's tokenizer.json, made from vocab.json and merges.txt in the cache where it has none.

    Raises:
        ModelError: The two files are there and transformers makes no tokenizer of them.
    """
    tokenizer_path = directory / TOKENIZER
    if tokenizer_path.is_file():
        return tokenizer_path
    if not all((directory / name).is_file() for name in SLOW_BPE):
        return None
    total = hashlib.sha256()
    for path in (directory / "config.json", *tokenizer_companions(directory)):
        total.update(f"{path.name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())

    def write(target: Path) -> None:
        save_tokenizer(directory, target)

    return written_once(cache_dir / f"tokenizer-{total.hexdigest()[:32]}", write) / TOKENIZER


def save_tokenizer(directory: Path, target: Path) -> None:
    """Write the tokenizer of a directory as tokenizer.json and its companions, by transformers."""
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            tokenizer.save_pretrained(target)
    except Exception as exc:  # the tokenizers library raises nothing more exact
        raise ModelError(f"{directory}: transformers makes no tokenizer of its files: {exc}") from exc
    if not (target / TOKENIZER).is_file():
        raise ModelError(f"{directory}: its tokenizer has no tokenizer.json form; use data.tokenizer.kind = 'file'")


def architecture_of(model_type: str) -> str:
    """Return the name of transformers' class for a language model of the family, as config.json has it."""
    predicts = FAMILIES[model_type].predicts if model_type in FAMILIES else "next"
    return str(_CLASSES[predicts][model_type])


def with_older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a config what transformers has renamed, under the names that other programs and older releases read.

    transformers 4, llama.cpp and older servers look for ``rope_theta``, ``rope_scaling`` and ``n_ctx``. Some of them
    take a default where such a key is missing, and then compute another model without a word.

    Args:
        config: The keys of a config.json as transformers 5 writes it; keys that it has stay as they are.
    """
    older: dict[str, Any] = {}
    family = config["model_type"]
    if family == "gpt2":
        older["n_ctx"] = config["n_positions"]
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        older["rope_theta"] = rope["rope_theta"]
        share = rope.get("partial_rotary_factor", 1.0)
        older |= {"rotary_pct": share} if family in _ROTARY_PCT else {}
        older |= {"rotary_emb_base": rope["rope_theta"]} if family == "gpt_neox" else {}
        older |= {"partial_rotary_factor": share} if "partial_rotary_factor" in rope else {}
        if rope.get("rope_type", "default") != "default":
            older["rope_scaling"] = dict(rope)
    return {**older, **config}
