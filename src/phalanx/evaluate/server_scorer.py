"""A model behind an OpenAI-compatible server, asked over ``/v1/completions`` and ``/v1/chat/completions``."""

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer

from phalanx.errors import ModelError, RewardError
from phalanx.evaluate.scorer import (
    DocumentScore,
    EndingRow,
    Likelihood,
    Progress,
    TokenScorer,
    WritingRule,
    ignore_progress,
)
from phalanx.models.directory import read_config
from phalanx.rewards.server import ServedModel, ServerSettings


def open_tokenizer(directory: Path) -> tuple[tokenizers.Tokenizer, int | None, int]:
    """Return tokenizer, begin or end of text, and window of a model's directory, whose weights may lack.

    Raises:
        ModelError: There is no tokenizer.json or no config.json, or it cannot be read.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{directory}: no tokenizer that can be read ({str(exc)[:200]})") from exc
    if not tokenizer.is_fast:
        raise ModelError(f"{directory}: has no tokenizer.json; `phalanx model import` makes one")
    bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    length = int(read_config(directory).get("max_position_embeddings") or 2048)
    return tokenizer.backend_tokenizer, eos_id if bos_id is None else bos_id, length


_TIMEOUT_S = 600.0
_MAX_BYTES = 1 << 26


class ServerWriter:
    """A served model that writes texts; without its tokenizer nothing can be scored.

    Args:
        is_chat: Whether prompts are sent as chats, which the server puts into its model's template.
    """

    def __init__(self, server: ServerSettings, *, is_chat: bool) -> None:
        self._server, self._is_chat = server, is_chat
        self._model = ServedModel(server, _TIMEOUT_S)
        self._fingerprint: str | None = None

    @property
    def can_write(self) -> bool:
        """Always."""
        return True

    @property
    def can_score(self) -> bool:
        """Whether the tokenizer is there."""
        return False

    @property
    def has_template(self) -> bool:
        """Whether prompts are sent as chats."""
        return self._is_chat

    def describe_model(self) -> dict[str, Any]:
        """Return address, name, and the fingerprint that the server gave; nothing of it is more than its word."""
        return {
            "kind": "server",
            "url": self._server.url,
            "model": self._server.model,
            "model_digest": None,
            "system_fingerprint": self._fingerprint,
        }

    def post_completions(self, route: str, asked: dict[str, Any]) -> list[Any]:
        """Return the choices of an answer, in the order of their prompts.

        Raises:
            RewardError: The server is not reached, or its answer has another form.
        """
        body = self._model.post_json(route, asked, _MAX_BYTES)
        choices = body.get("choices") if isinstance(body, dict) else None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise self.form_error("no list of choices")
        fingerprint = body.get("system_fingerprint")
        self._fingerprint = fingerprint[:80] if isinstance(fingerprint, str) else self._fingerprint
        return sorted(choices, key=lambda choice: choice["index"] if isinstance(choice.get("index"), int) else 0)

    def form_error(self, what: str) -> RewardError:
        """Return the error of an answer of another form."""
        return RewardError(f"{self._server.url}: answers with {what}; expected an OpenAI-compatible server")

    def score_endings(self, pairs: Sequence[tuple[str, str]], show: Progress = ignore_progress, /) -> list[Likelihood]:
        """Score nothing."""
        raise RewardError("a served model is scored by tokens; give its tokenizer: --tokenizer DIR")

    def score_documents(self, texts: Sequence[str], show: Progress = ignore_progress, /) -> list[DocumentScore]:
        """Score nothing."""
        raise RewardError("a served model is scored by tokens; give its tokenizer: --tokenizer DIR")

    def write_texts(
        self, prompts: Sequence[str], rule: WritingRule, show: Progress = ignore_progress, /, *, chat: bool = False
    ) -> list[str]:
        """Continue or answer each prompt.

        Raises:
            RewardError: The server is not reached, or its answer has another form.
        """
        asked: dict[str, Any] = {"max_tokens": rule.max_new_tokens, "temperature": rule.temperature}
        asked |= {"top_p": rule.top_p, "seed": rule.seed, **({"stop": list(rule.stops)} if rule.stops else {})}
        is_chat = chat and self._is_chat
        texts = []
        for prompt in prompts:
            if is_chat:
                messages = [{"role": "user", "content": prompt}]
                choices = self.post_completions("chat/completions", {**asked, "messages": messages})
                message = choices[0].get("message") if choices else None
                text = message.get("content") if isinstance(message, dict) else None
            else:
                choices = self.post_completions("completions", {**asked, "prompt": prompt})
                text = choices[0].get("text") if choices else None
            if not isinstance(text, str | None) or not choices:
                raise self.form_error("a text that is none")
            texts.append(text or "")
            show(len(texts), len(prompts))
        return texts


def _is_log_prob(value: Any) -> bool:
    """Whether a value is a number that a sum of a window's tokens can hold; JSON has integers of any size."""
    return isinstance(value, float | int) and not isinstance(value, bool) and -1e39 <= value <= 1e-3


class ServerScorer(TokenScorer):
    """A served model with its tokenizer: prompts are sent as token ids, and echoed with their log-probabilities.

    Args:
        window: Tokens that the server takes in a prompt.
    """

    def __init__(
        self, writer: ServerWriter, backend: tokenizers.Tokenizer, prefix: int | None, window: int, batch: int
    ) -> None:
        # the last token of a row is sent as well, since its log-probability comes with the echo
        super().__init__(backend, prefix, window - 1, min(batch, 64))
        self._writer = writer

    @property
    def can_write(self) -> bool:
        """Always."""
        return True

    @property
    def has_template(self) -> bool:
        """Whether prompts are sent as chats."""
        return self._writer.has_template

    def describe_model(self) -> dict[str, Any]:
        """Return address, name, fingerprint and window."""
        return {**self._writer.describe_model(), "window": self.window}

    def _score_batch(self, rows: Sequence[EndingRow]) -> list[Likelihood]:
        prompts = [[*row.context, *row.ending] for row in rows]
        asked = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        choices = self._writer.post_completions("completions", asked)
        if len(choices) != len(rows):
            raise self._writer.form_error(f"{len(choices)} choices to {len(rows)} prompts")
        return [self._read_scores(row, choice.get("logprobs")) for row, choice in zip(rows, choices, strict=True)]

    def _read_scores(self, row: EndingRow, scores: Any) -> Likelihood:
        begin, stop = len(row.context), len(row.context) + len(row.ending)
        values = scores.get("token_logprobs") if isinstance(scores, dict) else None
        tops = scores.get("top_logprobs") if isinstance(scores, dict) else None
        if not isinstance(values, list) or not isinstance(tops, list) or min(len(values), len(tops)) < stop:
            raise self._writer.form_error("no log-probability for each token of the prompt")
        log_probs = values[begin:stop]
        listed = [list(top.values()) if isinstance(top, dict) else [] for top in tops[begin:stop]]
        if not all(map(_is_log_prob, [*log_probs, *chain.from_iterable(listed)])):
            raise self._writer.form_error("log-probabilities that are none")
        best = [max(top, default=math.inf) for top in listed]
        is_greedy = all(value >= top - 1e-9 for value, top in zip(log_probs, best, strict=True))
        return Likelihood(math.fsum(log_probs), len(log_probs), is_greedy)

    def write_texts(
        self, prompts: Sequence[str], rule: WritingRule, show: Progress = ignore_progress, /, *, chat: bool = False
    ) -> list[str]:
        """Continue or answer each prompt."""
        return self._writer.write_texts(prompts, rule, show, chat=chat)
