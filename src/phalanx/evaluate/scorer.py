"""A model as evaluations ask it: log-likelihoods of endings, of whole documents, and texts that it writes.

Rows are sorted by length and computed in batches; padding stands behind a row, where causal attention does not look,
and a draw of a token depends on seed, prompt and place alone. So no figure depends on batch size or document order,
but for the last bits of a sum in floating point.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers
import torch
from pydantic import Field
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from phalanx.config import StrictModel
from phalanx.data.batch import IGNORE
from phalanx.data.borders import bare_encoder, border_of, first_ids_of
from phalanx.data.chat import ChatMessage
from phalanx.errors import DataError, ModelError
from phalanx.models.token_draw import draw_tokens, row_key

Progress = Callable[[int, int], None]
"""Told how many rows are done, of how many."""
_LOGIT_BYTES = 1 << 28
"""Of a batch's logits; a batch has fewer rows where they are longer."""


def ignore_progress(_done: int, _total: int) -> None:
    """Show nothing."""


class WritingRule(StrictModel):
    """The rule by which texts are written.

    Attributes:
        temperature: Temperature of the draw; 0 takes the likeliest token.
        stops: A text ends before the first of these.
    """

    max_new_tokens: int = Field(default=64, ge=1, le=1 << 16)
    temperature: float = Field(default=0.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    stops: tuple[str, ...] = Field(default=(), max_length=16)


@dataclass(frozen=True)
class EndingRow:
    """The tokens of an ending and those before it."""

    context: tuple[int, ...]
    ending: tuple[int, ...]


@dataclass(frozen=True)
class Likelihood:
    """How likely an ending is.

    Attributes:
        log_prob: Sum over all its tokens, in nats.
        is_greedy: Whether each token is the likeliest one at its place; None where the scorer cannot tell.
        is_cut: Whether the window did not hold the whole context.
    """

    log_prob: float
    num_tokens: int
    is_greedy: bool | None
    is_cut: bool = False


@dataclass(frozen=True)
class DocumentScore:
    """How likely a document is: nats of all its tokens, from at most a window's length before each."""

    nats: float
    num_tokens: int
    num_bytes: int


class Scorer(Protocol):
    """Something that an evaluation can ask."""

    @property
    def can_write(self) -> bool:
        """Whether it writes texts."""
        ...

    @property
    def can_score(self) -> bool:
        """Whether it gives log-likelihoods."""
        ...

    @property
    def has_template(self) -> bool:
        """Whether prompts are put into a chat template."""
        ...

    def describe_model(self) -> dict[str, Any]:
        """Return kind, digest of weights and vocabulary, digest of the template, window."""
        ...

    def score_endings(self, pairs: Sequence[tuple[str, str]], show: Progress = ..., /) -> list[Likelihood]:
        """Score the second text of each pair behind the first."""
        ...

    def score_documents(self, texts: Sequence[str], show: Progress = ..., /) -> list[DocumentScore]:
        """Score whole texts."""
        ...

    def write_texts(
        self, prompts: Sequence[str], rule: WritingRule, show: Progress = ..., /, *, chat: bool = False
    ) -> list[str]:
        """Continue each prompt; with `chat`, answer it by the model's template where it has one."""
        ...


def rolling_rows(ids: Sequence[int], prefix: int, window: int) -> Iterator[EndingRow]:
    """Yield rows that predict every token of a document once; the last one is as long as a window where it can be.

    Args:
        prefix: The token before the document.
        window: Tokens that the model reads at once.

    Source: lm-evaluation-harness 0.4, ``get_rolling_token_windows`` with a context of one token.
    """
    first = tuple(ids[:window])
    if first:
        yield EndingRow((prefix,), first)
    done = len(first)
    while done < len(ids):
        size = min(len(ids) - done, window)
        stop = done + size
        yield EndingRow(tuple(ids[stop - window - 1 : stop - size]), tuple(ids[stop - size : stop]))
        done = stop


class TokenScorer(ABC):
    """A scorer that encodes texts and gives the model tokens.

    Args:
        prefix: Token before a text that nothing stands before: begin or end of text.
        window: Tokens that the model reads at once.
        batch: Rows at once, at most.

    Attributes:
        full_backend: The tokenizer with its own tokens around a text.

    Raises:
        ModelError: It has no token that a text can begin behind.
    """

    def __init__(self, backend: tokenizers.Tokenizer, prefix: int | None, window: int, batch: int) -> None:
        self._backend, self.window, self._batch = bare_encoder(backend, special_is_text=True), window, batch
        self.full_backend = backend
        self._first = first_ids_of(backend)
        begin = self._first[-1] if self._first else prefix
        if begin is None:
            raise ModelError("the tokenizer has no begin or end of text, behind which a first token could be likely")
        self.prefix = begin

    @property
    def can_score(self) -> bool:
        """Always."""
        return True

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text without anything around it; a special token that is spelled out is text."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_pair(self, context: str, ending: str) -> EndingRow:
        """Encode context and ending as one text; a token that reaches over the border is the ending's.

        Raises:
            DataError: The ending has no token.
        """
        joined_text = context + ending
        encoding = self._backend.encode(joined_text, add_special_tokens=False)
        border = border_of(encoding, joined_text, len(context))
        before = (*self._first, *encoding.ids[:border])
        row = EndingRow(before or (self.prefix,), tuple(encoding.ids[border:]))
        if not row.ending:
            raise DataError(f"{ending!r:.60}: has no token of its own behind its context; give words")
        return row

    def score_endings(self, pairs: Sequence[tuple[str, str]], show: Progress = ignore_progress, /) -> list[Likelihood]:
        """Score the second text of each pair behind the first.

        Raises:
            DataError: An ending has no token, or is longer than the window.
            ModelError: A log-probability is no finite number.
        """
        return self.score_rows([self.encode_pair(context, ending) for context, ending in pairs], show)

    def score_documents(self, texts: Sequence[str], show: Progress = ignore_progress, /) -> list[DocumentScore]:
        """Score whole texts, from at most a window's length before each token.

        Raises:
            DataError: A text has no token.
            ModelError: A log-probability is no finite number.
        """
        rows_by_text = [list(rolling_rows(self.encode_text(text), self.prefix, self.window)) for text in texts]
        empty = next((number for number, rows in enumerate(rows_by_text, start=1) if not rows), None)
        if empty is not None:
            raise DataError(f"text {empty}: has no token; give words, or remove it")
        scores = iter(self.score_rows([row for rows in rows_by_text for row in rows], show))
        documents = []
        for text, rows in zip(texts, rows_by_text, strict=True):
            parts = [next(scores) for _ in rows]
            nats, num_tokens = -math.fsum(part.log_prob for part in parts), sum(part.num_tokens for part in parts)
            documents.append(DocumentScore(nats, num_tokens, len(text.encode("utf-8", "surrogatepass"))))
        return documents

    def score_rows(self, rows: Sequence[EndingRow], show: Progress = ignore_progress, /) -> list[Likelihood]:
        """Score rows of tokens; a context that does not fit is cut at its beginning.

        Raises:
            DataError: An ending is empty or longer than the window.
            ModelError: A log-probability is no finite number.
        """
        for row in rows:
            if not 0 < len(row.ending) <= self.window or not row.context:
                raise DataError(
                    f"an ending has {len(row.ending)} tokens behind {len(row.context)}; the window takes {self.window}"
                )
        room = [self.window + 1 - len(row.ending) for row in rows]
        fitted = [EndingRow(row.context[-size:], row.ending) for row, size in zip(rows, room, strict=True)]
        scores: dict[int, Likelihood] = {}
        for numbers in self._cut_batches(fitted):
            for number, score in zip(numbers, self._score_batch([fitted[number] for number in numbers]), strict=True):
                if not math.isfinite(score.log_prob):
                    raise ModelError("a log-probability is no finite number; the weights are damaged")
                is_cut = len(fitted[number].context) < len(rows[number].context)
                scores[number] = Likelihood(score.log_prob, score.num_tokens, score.is_greedy, is_cut)
            show(len(scores), len(rows))
        return [scores[number] for number in range(len(rows))]

    def _cut_batches(self, rows: Sequence[EndingRow]) -> Iterator[list[int]]:
        """Yield numbers of rows, longest first: what does not fit into memory fails at once."""
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number].context) - len(rows[number].ending))
        while order:
            size = self._max_rows(len(rows[order[0]].context) + len(rows[order[0]].ending))
            yield order[:size]
            order = order[size:]

    def _max_rows(self, _width: int) -> int:
        return self._batch

    @abstractmethod
    def _score_batch(self, rows: Sequence[EndingRow]) -> list[Likelihood]:
        """Score rows that fit."""


class LanguageModel(Protocol):
    """An opened model with its tokenizer; `phalanx.serve.TextModel` is one."""

    @property
    def module(self) -> Any:
        """The model that transformers loaded."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that transformers loaded."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens that the model reads at once."""
        ...

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder reads the prompt."""
        ...

    @property
    def has_template(self) -> bool:
        """Whether the model comes with a chat template."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text."""
        ...

    @property
    def model_digest(self) -> str:
        """SHA-256 in hex over weights, config, tokenizer, ends of texts and template."""
        ...

    @property
    def template_digest(self) -> str | None:
        """SHA-256 in hex of the chat template; None where there is none."""
        ...

    def chat_prompt(self, messages: Sequence[ChatMessage], /) -> list[int]:
        """Token ids of a chat, up to where the assistant begins."""
        ...

    def render_prompt(self, messages: Sequence[ChatMessage], /) -> str:
        """Return the text of a chat, up to where the assistant begins."""
        ...


class LocalScorer(TokenScorer):
    """A model in this process.

    Args:
        window: Fewer tokens at once than the model would take; None for all that it takes.

    Raises:
        ModelError: It has an encoder, or a tokenizer without a file of the tokenizers library.
    """

    def __init__(self, model: LanguageModel, *, batch: int = 8, window: int | None = None) -> None:
        if model.has_encoder:
            raise ModelError("the model has an encoder, and evaluations score decoders; use phalanx generate")
        if not model.tokenizer.is_fast:
            raise ModelError("the model has no tokenizer.json; `phalanx model import` makes one")
        bos_id, eos_id = model.tokenizer.bos_token_id, model.tokenizer.eos_token_id
        prefix = bos_id if bos_id is not None else eos_id if eos_id is not None else min(model.end_tokens, default=None)
        size = model.context_length if window is None else min(window, model.context_length)
        super().__init__(model.tokenizer.backend_tokenizer, prefix, size, batch)
        self._model = model
        self._vocab_size = int(model.module.get_input_embeddings().weight.shape[0])

    @property
    def can_write(self) -> bool:
        """Always."""
        return True

    @property
    def has_template(self) -> bool:
        """Whether the model comes with one."""
        return self._model.has_template

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text of a chat by the model's template."""
        return self._model.render_prompt(messages)

    def describe_model(self) -> dict[str, Any]:
        """Return what decides every figure but the suites."""
        return {
            "kind": "local",
            "model_digest": self._model.model_digest,
            "template_digest": self._model.template_digest,
            "window": self.window,
            "dtype": str(self._model.module.dtype).removeprefix("torch."),
        }

    def _max_rows(self, width: int) -> int:
        return max(1, min(self._batch, _LOGIT_BYTES // (4 * width * self._vocab_size)))

    @torch.inference_mode()
    def _score_batch(self, rows: Sequence[EndingRow]) -> list[Likelihood]:
        device = self._model.module.device
        tokens = [[*row.context, *row.ending] for row in rows]
        width = max(map(len, tokens)) - 1
        padded = torch.tensor([ids[:-1] + [self.prefix] * (width + 1 - len(ids)) for ids in tokens], device=device)
        logits: Tensor = self._model.module(input_ids=padded).logits
        scores = []
        for number, row in enumerate(rows):
            begin = len(row.context) - 1
            ending_logits = logits[number, begin : begin + len(row.ending)].float()
            targets = torch.tensor(row.ending, device=device)
            chosen = ending_logits.log_softmax(-1).gather(1, targets[:, None])
            is_greedy = bool((ending_logits.argmax(-1) == targets).all())
            scores.append(Likelihood(float(chosen.sum()), len(row.ending), is_greedy))
        return scores

    def write_texts(
        self, prompts: Sequence[str], rule: WritingRule, show: Progress = ignore_progress, /, *, chat: bool = False
    ) -> list[str]:
        """Continue each prompt, or answer it in a chat of its own.

        Raises:
            DataError: A prompt is empty, or leaves no room in the window.
            ModelError: A logit is no finite number.
        """
        if chat and self.has_template:
            messages = [[ChatMessage(role="user", content=prompt)] for prompt in prompts]
            encoded = [self._model.chat_prompt(chat_messages) for chat_messages in messages]
        else:
            encoded = [[*self._first, *self.encode_text(prompt)] or [self.prefix] for prompt in prompts]
        too_long = max(map(len, encoded), default=0)
        if too_long >= self.window:
            raise DataError(f"a prompt has {too_long} tokens, and the window of {self.window} leaves no room behind it")
        return self.write_ids(encoded, rule, show)

    def write_ids(
        self, prompts: Sequence[Sequence[int]], rule: WritingRule, show: Progress = ignore_progress, /
    ) -> list[str]:
        """Continue prompts of tokens.

        Raises:
            ModelError: A logit is no finite number.
        """
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        texts: dict[int, str] = {}
        while order:
            numbers, order = order[: self._batch], order[self._batch :]
            # one length a batch would change what a short prompt may still write
            sizes = {number: min(rule.max_new_tokens, self.window - len(prompts[number])) for number in numbers}
            written = self._write_batch([prompts[number] for number in numbers], rule, max(sizes.values()))
            for number, ids in zip(numbers, written, strict=True):
                texts[number] = self._finish_text(ids[: sizes[number]], rule.stops)
            show(len(texts), len(prompts))
        return [texts[number] for number in range(len(prompts))]

    def _write_batch(self, prompts: Sequence[Sequence[int]], rule: WritingRule, max_new: int) -> list[list[int]]:
        width, device = max(map(len, prompts)), self._model.module.device
        gaps = [width - len(prompt) for prompt in prompts]
        rows = [[self.prefix] * gap + list(prompt) for gap, prompt in zip(gaps, prompts, strict=True)]
        seen = [[0] * gap + [1] * (width - gap) for gap in gaps]
        draw = _TokenDraw([tuple(prompt) for prompt in prompts], rule)
        watch = _StopWatch(self._model.tokenizer, width, rule.stops, self._model.end_tokens)
        try:
            with torch.inference_mode():
                output: Tensor = self._model.module.generate(
                    torch.tensor(rows, device=device),
                    attention_mask=torch.tensor(seen, device=device),
                    max_new_tokens=max_new,
                    do_sample=False,
                    temperature=None,
                    top_k=None,
                    top_p=None,
                    repetition_penalty=1.0,
                    pad_token_id=min(self._model.end_tokens, default=self.prefix),
                    logits_processor=LogitsProcessorList([draw]),
                    stopping_criteria=StoppingCriteriaList([watch]),
                )
        except (RuntimeError, ValueError, IndexError) as exc:
            raise ModelError(f"the model cannot go on: {exc}") from exc
        return [list(ids) for ids in output[:, width:].tolist()]

    def _finish_text(self, ids: Sequence[int], stops: Sequence[str]) -> str:
        ends = self._model.end_tokens
        size = next((place for place, token in enumerate(ids) if token in ends), len(ids))
        text: str = self._model.tokenizer.decode(list(ids[:size]), skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop, maxsplit=1)[0]
        return text


class _TokenDraw:
    """Draws each row's token by itself: a race of keyed noise, so that no other row has a part in it."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], rule: WritingRule) -> None:
        self._digests = [hashlib.sha256(f"{rule.seed}\n{prompt}".encode()).digest() for prompt in prompts]
        self._rule, self._step = rule, 0

    def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
        if not bool(torch.isfinite(scores).all()):
            raise ModelError("a logit is no finite number; the weights are damaged or training had diverged")
        if self._rule.temperature == 0.0:
            return scores
        keys = [row_key(hashlib.sha256(digest + self._step.to_bytes(8, "big")).digest()) for digest in self._digests]
        self._step += 1
        tokens, _ = draw_tokens(scores, torch.tensor(keys, device=scores.device), self._rule)
        return torch.full_like(scores, -math.inf).scatter_(1, tokens[:, None].to(scores.device), 0.0)


class _StopWatch:
    """Ends a row where its text holds a stop."""

    def __init__(self, tokenizer: Any, width: int, stops: Sequence[str], ends: frozenset[int]) -> None:
        self._tokenizer, self._width, self._stops, self._ends = tokenizer, width, stops, ends

    def __call__(self, ids: Tensor, _scores: Tensor, **_: object) -> Tensor:
        if not self._stops:
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        texts = self._tokenizer.batch_decode(ids[:, self._width :], skip_special_tokens=True)
        over = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(over, dtype=torch.bool, device=ids.device)


class RowScorer(TokenScorer):
    """A model that tells the summed loss of one row at a time: that of a run while it trains.

    Args:
        sum_loss: Returns the sum of nats of inputs and labels ``[1, seq]``; labels are `IGNORE` elsewhere.
        facts: Entries that `describe_model` returns.
        multiple: A row is filled up to a multiple of so many tokens, at most to the window.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        prefix: int,
        window: int,
        sum_loss: Callable[[Tensor, Tensor], float],
        facts: Mapping[str, Any],
        multiple: int,
    ) -> None:
        super().__init__(backend, prefix, window, 1)
        self._sum_loss, self._facts, self._multiple = sum_loss, facts, multiple

    @property
    def can_write(self) -> bool:
        """Never: parties hold the model in parts."""
        return False

    @property
    def has_template(self) -> bool:
        """Never asked for."""
        return False

    def describe_model(self) -> dict[str, Any]:
        """Return the facts of the run."""
        return {**self._facts, "window": self.window}

    def _score_batch(self, rows: Sequence[EndingRow]) -> list[Likelihood]:
        scores = []
        for row in rows:
            tokens = [*row.context, *row.ending]
            width = min(self.window, -(-(len(tokens) - 1) // self._multiple) * self._multiple)
            ids = tokens[:-1] + [self.prefix] * (width + 1 - len(tokens))
            labels = [IGNORE] * (len(row.context) - 1) + list(row.ending)
            labels += [IGNORE] * (width - len(labels))
            loss = self._sum_loss(torch.tensor([ids]), torch.tensor([labels]))
            scores.append(Likelihood(-loss, len(row.ending), None))
        return scores

    def write_texts(
        self, prompts: Sequence[str], rule: WritingRule, show: Progress = ignore_progress, /, *, chat: bool = False
    ) -> list[str]:
        """Write nothing.

        Raises:
            ModelError: Always.
        """
        raise ModelError("a model that trains writes no texts; evaluate a checkpoint")
