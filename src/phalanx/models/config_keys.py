"""The keys that a family's config knows, read from transformers' source: to import its class would import torch."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phalanx.errors import ModelError

OLD_KEYS = ("rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "sliding_window_pattern")
"""Keys of older files that transformers takes beside the fields of its class."""
_OLD_KEYS_OF_SOME = {
    *OLD_KEYS,
    *(
        "global_attn_every_n_layers",
        "global_rope_theta",
        "local_rope_theta",
        "reference_compile",
        "n_embed",
        "head_dim",
        "decoder_start_token_id",
        "tie_word_embeddings",
        "scale_decoder_outputs",
        "dense_act_fn",
        "is_gated_act",
        "n_positions",
    ),
}
"""Those of every family; the later check knows which family knows which of them."""
_BASE = "PreTrainedConfig"


def check_keys(described: Mapping[str, Any], where: str) -> None:
    """Refuse a key that the family's config does not know; where its source is not understood, nothing is said yet."""
    family = described.get("model_type")
    known_keys = config_keys(family) if isinstance(family, str) else None
    unknown = [] if known_keys is None else sorted(set(described) - known_keys - _OLD_KEYS_OF_SOME)
    if unknown:
        raise unknown_key(unknown[0], str(family), known_keys or frozenset(), where)


def unknown_key(key: str, family: str, known: frozenset[str] | set[str], where: str) -> ModelError:
    """Say that a key is none of a family's."""
    return ModelError(f"{where}: unknown key {key!r} for {family}; choices: {', '.join(sorted(known))}").with_facts(
        code="PHX-I036", key=f"{where}.{key}", found=key, expected=", ".join(sorted(known))
    )


@cache
def config_keys(family: str) -> frozenset[str] | None:
    """Return every key of a family's config but older ones; None where its class is not written as most are."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not family.isidentifier():
        return None
    home = Path(spec.origin).parent
    class_node = _class_of(home / "models" / family / f"configuration_{family}.py", family=family)
    base = _class_of(home / "configuration_utils.py", name=_BASE)
    if class_node is None or base is None or [ast.unparse(base_node) for base_node in class_node.bases] != [_BASE]:
        return None
    return frozenset(
        {"model_type", *_annotated_fields(class_node), *_annotated_fields(base), *_other_names(class_node)}
    )


def _class_of(path: Path, *, family: str = "", name: str = "") -> ast.ClassDef | None:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return next(
        (
            candidate
            for candidate in classes
            if candidate.name == name or (family and _assigned_value(candidate, "model_type") == family)
        ),
        None,
    )


def _annotated_fields(definition: ast.ClassDef) -> Iterator[str]:
    for node in definition.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and not ast.unparse(node.annotation).startswith("ClassVar")
        ):
            yield node.target.id


def _other_names(definition: ast.ClassDef) -> Iterator[str]:
    names = _assigned_value(definition, "attribute_map")
    yield from names if isinstance(names, dict) else ()


def _assigned_value(definition: ast.ClassDef, name: str) -> Any:
    for node in definition.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in targets
        ):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                return None
    return None
