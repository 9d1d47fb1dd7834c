"""Which chat template a model has, and which one it gets where it has none."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.data.sources.files import read_text
from phalanx.errors import DataError

TEMPLATE_FILE = "chat_template.jinja"
MARKS = ("<|im_start|>", "<|im_end|>")
"""Special tokens that begin and end a turn of ChatML."""
_MAX_CHARACTERS = 1 << 20
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_DECLARATIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_BARRED_ROLES = ("user", "assistant", "system", "tool", "function", "human", "bot", "prompter", "model")
_ROLE_MARKS = ("[INST]", "[/INST]", *(f"<|{role}|>" for role in _BARRED_ROLES))

_CHATML = (
    "{#- chatml of Phalanx -#}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ (message['content'] or '') + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PLAIN = (
    "{#- plain of Phalanx -#}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ 'Assistant:' }}{% generation %}{{ ' ' + (message['content'] or '') + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['role'] | capitalize + ': ' + (message['content'] or '') + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
DEFAULT_TEMPLATES: Mapping[str, str] = {"chatml": _CHATML, "plain": _PLAIN}
"""Templates for models without one. ``chatml`` needs two special tokens, ``plain`` none but the end of text."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
        tokens: The special tokens that it finds by name: ``eos_token``, ``bos_token`` and so on.
        text_marks: Names of roles in marks that its model was trained to read as text, as Zephyr's and Tulu's.
    """

    name: str
    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    text_marks: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if len(self.source) > _MAX_CHARACTERS:
            raise DataError(f"{self.name}: the chat template exceeds {_MAX_CHARACTERS} characters")


def default_template(name: str, end_of_text: str) -> ChatTemplate:
    """Return one of the templates that come with Phalanx.

    Args:
        name: A key of `DEFAULT_TEMPLATES`.
    """
    return ChatTemplate(name, DEFAULT_TEMPLATES[name], {"eos_token": end_of_text})


def template_from_file(path: Path, directory: Path | None, end_of_text: str) -> ChatTemplate:
    """Read a template that a run file names; its special tokens come from the model's directory."""
    tokens = {"eos_token": end_of_text, **({} if directory is None else _special_tokens(directory))}
    return ChatTemplate(str(path), read_text(path), tokens)


def model_template(directory: Path) -> ChatTemplate | None:
    """Return the template in a model's directory; None where it has none.

    Looked for in ``chat_template.jinja``, ``chat_template.json`` and ``tokenizer_config.json``, in this order; of
    several by name, the one called "default".
    """
    tokens = _special_tokens(directory)
    path = directory / TEMPLATE_FILE
    if path.is_file():
        source = read_text(path)
        return ChatTemplate(str(path), source, tokens, text_marks(directory))
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _read_json_object(directory / name).get("chat_template")
        if isinstance(template, list):
            by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = by_name.get("default")
        if isinstance(template, str) and template:
            return ChatTemplate(str(directory / name), template, tokens, text_marks(directory))
    return None


def text_marks(directory: Path) -> frozenset[str]:
    """Return the marks of roles that no file beside a model's tokenizer declares as tokens: its template's are text."""
    declared = [_read_json_object(directory / name) for name in _DECLARATIONS]
    declared_text = json.dumps([{**entry, "chat_template": None} for entry in declared], ensure_ascii=False)
    return frozenset(mark for mark in _ROLE_MARKS if json.dumps(mark) not in declared_text)


def _special_tokens(directory: Path) -> dict[str, str]:
    settings = {
        **_read_json_object(directory / "special_tokens_map.json"),
        **_read_json_object(directory / "tokenizer_config.json"),
    }
    named = {name: settings.get(name) for name in _TOKENS}
    plain = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: token for name, token in plain.items() if isinstance(token, str)}


def _read_json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{path}: is not JSON ({exc}); save it again from its model") from exc
    if not isinstance(value, dict):
        raise DataError(f"{path}: found a JSON {type(value).__name__}, expected an object")
    return value
