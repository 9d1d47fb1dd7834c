"""The table of model families, and hub configs checked against it."""

import copy
import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from phalanx.config import canonical_json, resolve_kind, unfit_code_error, users_traceback
from phalanx.errors import ConfigError, ModelError
from phalanx.models.config_keys import unknown_key
from phalanx.models.directory import check_counts
from phalanx.models.family import Family
from phalanx.models.planned import FamilyByPlan
from phalanx.models.quiet import quiet_transformers
from phalanx.models.written.bert import Bert
from phalanx.models.written.decoders import Bloom, Gpt2, Llama
from phalanx.models.written.falcon import Falcon
from phalanx.models.written.modernbert import ModernBert
from phalanx.models.written.opt import Opt
from phalanx.models.written.t5 import T5
from phalanx.planner.model.families import FAMILIES as FACTS
from phalanx.planner.model.families import FamilyFacts
from phalanx.planner.model.families.planned import PlannedFamily
from phalanx.planner.model.shape import VALUE_HEAD, HeadKind, head_kind

_WRITTEN = (Bert(), Bloom(), Falcon(), Gpt2(), Llama(), ModernBert(), Opt(), T5())
FAMILIES: dict[str, Family] = {
    model_type: FamilyByPlan(model_type) for model_type, facts in FACTS.items() if facts.slicing is not None
} | {family.model_type: family for family in _WRITTEN}


ADOPTED: set[str] = set()
"""Families in the tables that are the user's own."""
_EXPECTED = (
    "a PlannedFamily that is called as its model_type, or a class that inherits from phalanx.models.Family with "
    "model_type and facts"
)

# what transformers and torch raise over a config that they cannot read or build
TRANSFORMERS_REFUSALS = (
    StrictDataclassError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

_MAX_HEAD_DIM = 2**16
"""Numbers of one head; rotary tables are made of it, whatever the weights are."""

# where a config was once loaded from is private
_LOCAL_KEYS = ("_name_or_path", "_model_name_or_path")


def adopt_family(kind: str) -> Family:
    """Add a family of the user's own, which this process has loaded, to the tables.

    Args:
        kind: A reference, as `model.family` or a worker's own file has it.

    Raises:
        ConfigError: It was not loaded here, is no family, or is called as one that is there.
    """
    family, facts = resolve_kind(kind, {}, _own_family)
    name = family if isinstance(family, str) else family.model_type
    if name in FAMILIES and name not in ADOPTED:
        raise unfit_code_error(
            kind.partition("@")[0], f"a family for model_type {name!r}", "one for a model_type that has no family here"
        )
    ADOPTED.add(name)
    FACTS[name] = facts
    FAMILIES[name] = FamilyByPlan(name) if isinstance(family, str) else family
    return FAMILIES[name]


def _own_family(kind: str, implementation: Any) -> tuple[Family | str, FamilyFacts]:
    """Make a family from a reference.

    Returns:
        The family, or the model_type of one that transformers' plan cuts; and the facts that need no torch.
    """
    if isinstance(implementation, PlannedFamily):
        return kind.rpartition(":")[2], implementation.family_facts
    if not (isinstance(implementation, type) and issubclass(implementation, Family)):
        raise unfit_code_error(kind, f"a {type(implementation).__name__}", _EXPECTED)
    missing = [
        name for name in ("model_type", "prefix", "trunk", "facts") if getattr(implementation, name, None) is None
    ]
    if implementation.facts is Family.facts:
        missing.append("facts")
    if missing:
        raise unfit_code_error(kind, f"a family without {' and '.join(missing)}", _EXPECTED)
    try:
        family = implementation()
        facts = family.facts
    except Exception as exc:
        # whatever the user's code raises
        raise ConfigError(f"{kind}: cannot be made:\n{users_traceback(exc)}") from exc
    return family, facts


def family_of(model_type: object, where: str) -> Family:
    """Return the slicing rule of a family."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"{where}: model_type: found {model_type!r}{_why_not(model_type)}; expected one of "
            f"{', '.join(sorted(FAMILIES))}"
        ).with_facts(
            code="PHX-I033",
            file=where,
            key="model_type",
            found=str(model_type),
            expected=", ".join(sorted(FAMILIES)),
        )
    return FAMILIES[model_type]


def _why_not(model_type: object) -> str:
    """What is known of a family without a rule, for a message."""
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return ""
    config_class = CONFIG_MAPPING[model_type]
    if any("expert" in name for name in getattr(config_class, "base_model_tp_plan", None) or ()):
        return ", a mixture of experts, which stages do not carry"
    if getattr(config_class, "base_model_pp_plan", None):
        return ", which transformers can cut and no test here has held to its bits yet"
    return ", for which transformers has no pipeline plan"


def parse_hub_config(data: Mapping[str, Any], where: str, refuse_unknown: bool = False) -> Any:
    """Turn a hub config's keys into transformers' config object.

    Args:
        data: The keys of a config.json, ``model_type`` included.
        where: File or section for the messages.
        refuse_unknown: Refuse keys that the family does not know; transformers takes them in silence.
    """
    family = family_of(data.get("model_type"), where)
    check_counts(data, where)
    config_class = CONFIG_MAPPING[family.model_type]
    if refuse_unknown:
        known_keys = {field.name for field in dataclasses.fields(config_class)}
        known_keys |= {"model_type", *family.old_keys, *config_class.attribute_map}
        unknown = sorted(set(data) - known_keys)
        if unknown:
            raise unknown_key(unknown[0], family.model_type, known_keys, where)
    try:
        with quiet_transformers():
            config = config_class.from_dict(dict(data))
    except TRANSFORMERS_REFUSALS as exc:
        raise ModelError(f"{where}: is refused by transformers: {exc}") from exc
    _check_config(config, family, where)
    return config


def made_one_by_one(data: Mapping[str, Any]) -> int:
    """Return how many layers or labels these keys ask for, whichever are more; nothing is made of any.

    transformers makes these one after another where it reads a config or builds a model of it. Every other number is a
    width, which takes no work before there is memory for weights.
    """
    family = family_of(data.get("model_type"), "model config")
    layers = CONFIG_MAPPING[family.model_type].attribute_map.get("num_hidden_layers", "num_hidden_layers")
    asked = (data.get(key) for key in (layers, "num_hidden_layers", "num_labels"))
    return max((number for number in asked if type(number) is int), default=0)


def shared_hub_config(data: Mapping[str, Any]) -> Any:
    """Return the config of equal keys that was parsed before; it is read, and never changed."""
    try:
        key = canonical_json(dict(data))
    except (TypeError, ValueError, RecursionError) as exc:
        raise ModelError(f"model config: {exc}; expected numbers, words and lists as JSON has them") from exc
    return _parsed_once(key)


@lru_cache(maxsize=16)
def _parsed_once(data: bytes) -> Any:
    return parse_hub_config(json.loads(data), "model config")


def hub_config_dict(hub_config: Any) -> dict[str, Any]:
    """Return a config as plain JSON data, without the path that it was loaded from."""
    data: dict[str, Any] = json.loads(hub_config.to_json_string(use_diff=False))
    return {key: value for key, value in data.items() if key not in _LOCAL_KEYS}


def head_of(hub_config: Any) -> HeadKind:
    """Return the head that a config object describes."""
    keys = ("architectures", "num_labels", VALUE_HEAD)
    return head_kind({key: getattr(hub_config, key, None) for key in keys})


def config_with_head(hub_config: Any, kind: HeadKind, where: str) -> Any:
    """Return a copy of a config with another head.

    Raises:
        ModelError: transformers has no class for scores of the family, so no file of the hub could tell of them; or the
            family is one of encoders.
    """
    predicts = family_of(hub_config.model_type, where).facts.predicts
    if predicts != "next":
        raise ModelError(
            f'model.head = "{kind}": {hub_config.model_type} has an encoder, and the head of it predicts '
            f"{'hidden tokens' if predicts == 'hidden' else 'a target'} ({where}); take a model of another family"
        )
    changed = copy.deepcopy(hub_config)
    changed.architectures = None
    setattr(changed, VALUE_HEAD, kind == "lm_and_score")
    if kind == "lm":
        delattr(changed, VALUE_HEAD)
    if kind == "score":
        name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(hub_config.model_type)
        if name is None:
            raise ModelError(
                f'model.head = "score": transformers has no class that scores texts for {hub_config.model_type} '
                f"({where}); take a model of another family"
            )
        delattr(changed, VALUE_HEAD)
        changed.architectures, changed.num_labels, changed.tie_word_embeddings = [name], 1, False
    return changed


def _check_config(config: Any, family: Family, where: str) -> None:
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        value = getattr(config, key, None)
        if type(value) is not int or value < 1:
            raise ModelError(f"{where}: {key}: found {value!r}; expected a whole number of at least 1")
    if config.hidden_size % config.num_attention_heads and getattr(config, "head_dim", None) is None:
        raise ModelError(
            f"{where}: hidden_size {config.hidden_size} is no multiple of "
            f"{config.num_attention_heads} attention heads; change one of them"
        )
    _check_rotary(config, where)
    if not getattr(config, "is_causal", True):
        raise ModelError(f"{where}: is_causal = false: a language model must not see the future; set it to true")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{where}: quantization_config: cannot be trained; give the model in floating point")
    objection = family.find_objection(config)
    if objection is not None:
        raise ModelError(f"{where}: {objection}")


def _check_rotary(config: Any, where: str) -> None:
    """Refuse sizes of rotary tables beyond any head: no weight has them, so that no file could bear them out."""
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and not (type(head_dim) is int and 1 <= head_dim <= _MAX_HEAD_DIM):
        raise ModelError(f"{where}: head_dim: found {head_dim!r:.40}; expected 1 to {_MAX_HEAD_DIM}")
    rope = getattr(config, "rope_parameters", None) or {}
    # one for each type of layer, where layers differ
    for table in (rope, *rope.values()):
        share = table.get("partial_rotary_factor") if isinstance(table, dict) else None
        if share is not None and not (type(share) in (int, float) and 0 <= share <= 1):
            raise ModelError(f"{where}: partial_rotary_factor: found {share!r:.40}; expected a number from 0 to 1")
