"""The rule of each kind of reward; runs in the child process of `RewardScorer` alone."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.config import resolve_kind, unfit_code_error, users_traceback
from phalanx.errors import ConfigError, DataError, ModelError, PhalanxError, RewardError
from phalanx.rewards.config import ExactReward, JudgeReward, ModelReward, PatternReward, PlacesReward, RewardSettings
from phalanx.rewards.server import ServedModel

Rule = Callable[[str, str, Mapping[str, Any]], Any]
"""From prompt, text and the prompt's record to a number."""

_QUESTION = """How good is the answer, from 0 to 10? Say one number and nothing else.

Prompt: {prompt}

Answer: {text}"""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def open_reward(config: RewardSettings) -> Rule:
    """Open one reward by its config."""
    opened: Rule = resolve_kind(config.kind, _RULES, _own_rule)(config)
    return opened


def _exact_rule(config: ExactReward) -> Rule:
    return lambda _prompt, text, record: float(text.strip() == _expected_text(record, config.field).strip())


def _places_rule(config: PlacesReward) -> Rule:
    def places(_prompt: str, text: str, record: Mapping[str, Any]) -> float:
        expected = _expected_text(record, config.field).strip()
        answer = text.strip()
        right = sum(character == other for character, other in zip(answer, expected, strict=False))
        return right / max(len(expected), len(answer), 1)

    return places


def _expected_text(record: Mapping[str, Any], field: str) -> str:
    if not isinstance(record.get(field), str):
        raise DataError(f'its record has no text "{field}"; add it, or name another field')
    return str(record[field])


def _pattern_rule(config: PatternReward) -> Rule:
    pattern = re.compile(config.pattern)
    return lambda _prompt, text, _record: float(pattern.search(text) is not None)


def _model_rule(config: ModelReward) -> Rule:
    import torch  # noqa: PLC0415 - most rewards need none
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: PLC0415

    from phalanx.models.directory import read_config  # noqa: PLC0415
    from phalanx.models.families import TRANSFORMERS_REFUSALS  # noqa: PLC0415
    from phalanx.models.weights import check_claims  # noqa: PLC0415

    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        read_config(config.path)
        check_claims(config.path, AutoModelForSequenceClassification)
        tokenizer = AutoTokenizer.from_pretrained(config.path, **safe)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            config.path, use_safetensors=True, output_loading_info=True, **safe
        )
    except (ModelError, OSError, *TRANSFORMERS_REFUSALS) as exc:
        raise ConfigError(f"{config.path}: is no reward model that transformers loads ({str(exc)[:300]})") from exc
    if report["missing_keys"]:
        raise ConfigError(f"{config.path}: lacks the tensors {', '.join(sorted(report['missing_keys']))[:300]}")
    model.eval()
    if model.config.num_labels != 1:
        raise ConfigError(f"{config.path}: has {model.config.num_labels} classes; a reward model has one")

    def rated(prompt: str, text: str, record: Mapping[str, Any]) -> float:
        ids = _rated_ids(tokenizer, prompt, text, record)
        window = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or len(ids))
        if len(ids) > window:
            raise RewardError(f"{config.path}: prompt and text have {len(ids)} tokens, its window is {window}")
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([ids])).logits[0, 0])

    return rated


def _rated_ids(tokenizer: Any, prompt: str, text: str, record: Mapping[str, Any]) -> list[int]:
    """Tokens as a reward model is trained on them: up to the end token of the answer, whose score counts."""
    if isinstance(record.get("prompt"), list) and tokenizer.chat_template is not None:
        messages = [*record["prompt"], {"role": "assistant", "content": text}]
        conversation = tokenizer.apply_chat_template(messages, tools=record.get("tools") or None, tokenize=False)
        # what a template writes behind the end of a turn nobody says
        return list(tokenizer(conversation.rstrip(), add_special_tokens=False)["input_ids"])
    ids, bare = (list(tokenizer(prompt + text, add_special_tokens=adds)["input_ids"]) for adds in (True, False))
    begins = (start for start in range(len(ids) - len(bare) + 1) if ids[start : start + len(bare)] == bare)
    ids = ids[: next(begins, len(ids)) + len(bare)]
    eos_id = tokenizer.eos_token_id
    return ids if eos_id is None or ids[-1:] == [eos_id] else [*ids, eos_id]


def _judge_rule(config: JudgeReward) -> Rule:
    served = ServedModel(config)

    def judged(prompt: str, text: str, _record: Mapping[str, Any]) -> float:
        reply = served.ask_question((config.question or _QUESTION).replace("{prompt}", prompt).replace("{text}", text))
        numbers = _NUMBER.findall(reply)
        if len(numbers) != 1:
            raise RewardError(f"{config.url}: the judge said {len(numbers)} numbers; expected one and nothing else")
        return float(numbers[0])

    return judged


def _own_rule(kind: str, function: Any) -> Callable[[RewardSettings], Rule]:
    if not callable(function):
        raise unfit_code_error(
            kind, f"a {type(function).__name__}", "a function of prompt, text and record that returns a number"
        )

    def own(prompt: str, text: str, record: Mapping[str, Any]) -> Any:
        try:
            return function(prompt, text, dict(record))
        except PhalanxError:
            raise
        except Exception as exc:
            # whatever the user's code raises
            raise RewardError(f"failed:\n{users_traceback(exc)}") from exc

    return lambda _: own


_RULES: dict[str, Callable[[Any], Rule]] = {
    "exact": _exact_rule,
    "places": _places_rule,
    "pattern": _pattern_rule,
    "model": _model_rule,
    "judge": _judge_rule,
}
