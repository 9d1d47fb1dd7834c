"""What each kind of reward says of one text; runs in the child process of `RewardScorer` alone."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.config import lacks, resolve, users_traceback
from phalanx.errors import ConfigError, DataError, PhalanxError, RewardError
from phalanx.rewards.config import ExactReward, JudgeReward, ModelReward, PatternReward, PlacesReward, RewardSettings

Rule = Callable[[str, str, Mapping[str, Any]], Any]
"""From prompt, text and the prompt's record to a number."""

_MOST_REPLY_BYTES = 1 << 20
_QUESTION = """How good is the answer, from 0 to 10? Say one number and nothing else.

Prompt: {prompt}

Answer: {text}"""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def open_reward(config: RewardSettings) -> Rule:
    """Make ready what a reward needs.

    Raises:
        PhalanxError: A model, a key or a function is missing or wrong.
    """
    opened: Rule = resolve(config.kind, _RULES, _own_rule)(config)
    return opened


def _exact(config: ExactReward) -> Rule:
    return lambda _prompt, text, record: float(text.strip() == _expected(record, config.field).strip())


def _places(config: PlacesReward) -> Rule:
    def places(_prompt: str, text: str, record: Mapping[str, Any]) -> float:
        expected = _expected(record, config.field).strip()
        found = text.strip()
        right = sum(one == other for one, other in zip(found, expected, strict=False))
        return right / max(len(expected), len(found), 1)

    return places


def _expected(record: Mapping[str, Any], field: str) -> str:
    if not isinstance(record.get(field), str):
        raise DataError(f'its record has no text "{field}"; add it, or name another field')
    return str(record[field])


def _pattern(config: PatternReward) -> Rule:
    pattern = re.compile(config.pattern)
    return lambda _prompt, text, _record: float(pattern.search(text) is not None)


def _model(config: ModelReward) -> Rule:
    import torch  # noqa: PLC0415 - most rewards need none
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: PLC0415

    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, **safe)
        model = AutoModelForSequenceClassification.from_pretrained(config.path, use_safetensors=True, **safe).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ConfigError(f"{config.path}: is no reward model that transformers loads ({str(exc)[:300]})") from exc
    if model.config.num_labels != 1:
        raise ConfigError(f"{config.path}: has {model.config.num_labels} classes; a reward model has one")

    def rated(prompt: str, text: str, _record: Mapping[str, Any]) -> float:
        with torch.no_grad():
            return float(model(**tokenizer(prompt + text, return_tensors="pt", truncation=True)).logits[0, 0])

    return rated


def _judge(config: JudgeReward) -> Rule:
    headers = {"content-type": "application/json"}
    if config.key_file is not None:
        try:
            headers["authorization"] = f"Bearer {config.key_file.read_text(encoding='utf-8').strip()}"
        except OSError as exc:
            raise ConfigError(f"{config.key_file}: the judge's key cannot be read ({exc.strerror})") from exc
    # no proxy of the environment, no redirection to elsewhere
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def judged(prompt: str, text: str, _record: Mapping[str, Any]) -> float:
        question = (config.question or _QUESTION).replace("{prompt}", prompt).replace("{text}", text)
        asked = {"model": config.model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(  # noqa: S310 - the config takes http and https alone
            f"{config.url.rstrip('/')}/chat/completions", json.dumps(asked).encode(), headers
        )
        try:
            with opener.open(request) as reply:
                said = json.loads(reply.read(_MOST_REPLY_BYTES))["choices"][0]["message"]["content"]
        except (OSError, ValueError, KeyError, IndexError, TypeError) as exc:
            raise RewardError(f"{config.url}: gives no answer that can be read ({type(exc).__name__}: {exc})") from exc
        numbers = _NUMBER.findall(said) if isinstance(said, str) else []
        if len(numbers) != 1:
            raise RewardError(f"{config.url}: the judge said {len(numbers)} numbers; expected one and nothing else")
        return float(numbers[0])

    return judged


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection is an answer of the wrong kind."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow nothing."""
        return


def _own_rule(kind: str, function: Any) -> Callable[[RewardSettings], Rule]:
    if not callable(function):
        raise lacks(kind, f"a {type(function).__name__}", "a function of prompt, text and record that returns a number")

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
    "exact": _exact,
    "places": _places,
    "pattern": _pattern,
    "model": _model,
    "judge": _judge,
}
