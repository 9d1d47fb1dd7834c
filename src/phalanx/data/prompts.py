"""Prompts of a run that learns from what its model writes: JSON lines, a prompt and what belongs to it on each."""

import contextlib
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from phalanx.config import canonical_json
from phalanx.data.batch import IGNORE, Batch
from phalanx.data.chat.conversation import Conversation, parse_prompt
from phalanx.data.chat.encoding import ChatEncoder, open_chat
from phalanx.data.chat.settings import OF_MODEL
from phalanx.data.config import BpeConfig, DataConfig
from phalanx.data.publish import publish_file
from phalanx.data.sources.files import note_file_read
from phalanx.data.sources.jsonl import parse_object
from phalanx.data.tokenizers.tokenizer import (
    TOKENIZER_FILE,
    TextTokenizer,
    end_of_text,
    load_tokenizer,
    locate_tokenizer,
    vocabulary_digest,
)
from phalanx.data.tokenizers.training import train_bpe
from phalanx.errors import DataError

PROMPT = "prompt"


@dataclass(frozen=True)
class PromptRecord:
    """One line of a file of prompts."""

    where: str
    text: str
    ids: tuple[int, ...]
    record: Mapping[str, Any]
    conversation: Conversation | None = None

    @property
    def reward_record(self) -> dict[str, Any]:
        """The line as rewards are given it: its messages and tools in the form that a template sees."""
        if self.conversation is None:
            return dict(self.record)
        messages = [message.for_template() for message in self.conversation.messages]
        tools = {"tools": list(self.conversation.tools)} if self.conversation.tools else {}
        return {**self.record, PROMPT: messages, **tools}


class PromptSet:
    """The prompts of a run, those to train on apart from those held out.

    Attributes:
        tokenizer_path: Its ``tokenizer.json``.
        ends: Tokens that end a written text: the tokenizer's, and where prompts are conversations the one that ends a
            turn.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        path: Path,
        train: Sequence[PromptRecord],
        held_out: Sequence[PromptRecord],
        end_of_turn: int | None = None,
    ) -> None:
        self.tokenizer, self.tokenizer_path = tokenizer, path
        self.train, self.held_out = tuple(train), tuple(held_out)
        ends = [tokenizer.eos_id] if end_of_turn is None else [tokenizer.eos_id, end_of_turn]
        self.ends = tuple(dict.fromkeys(ends))

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex over the vocabulary and every prompt with its record."""
        prompt_rows = [[list(prompt.ids), dict(prompt.record)] for prompt in (*self.train, *self.held_out)]
        counts = [len(self.train), len(self.held_out)]
        return hashlib.sha256(canonical_json([self.vocabulary_digest, counts, prompt_rows])).hexdigest()

    @cached_property
    def vocabulary_digest(self) -> str:
        """SHA-256 in hex over what decides the ids of a text."""
        return vocabulary_digest(self.tokenizer)

    @property
    def num_train_sequences(self) -> int:
        """Prompts to train on."""
        return len(self.train)

    def train_batch(self, indices: Sequence[int]) -> Batch:
        """Prompts by number as rows without a target, padded behind."""
        return self._prompt_batch([self.train[index] for index in indices], indices)

    @property
    def num_validation_sequences(self) -> int:
        """Prompts that are held out."""
        return len(self.held_out)

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """Held-out prompts by number as rows without a target, padded behind."""
        return self._prompt_batch([self.held_out[index] for index in indices], indices)

    def _prompt_batch(self, prompts: Sequence[PromptRecord], indices: Sequence[int]) -> Batch:
        ids = torch.full((len(prompts), max(len(prompt.ids) for prompt in prompts)), self.tokenizer.eos_id)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt.ids)] = torch.tensor(prompt.ids)
        return Batch(ids, torch.full_like(ids, IGNORE), tuple(indices))


def prepare_prompts(
    data: DataConfig, cache: Path, seed: int, model_tokenizer: Path | None, max_new_tokens: int
) -> PromptSet:
    """Read the prompts of a run file.

    Args:
        data: Needs `prompts`.
    """
    lines = [(*row, source.ignore) for source in data.prompts for row in _read_prompt_lines(source.path)]
    if isinstance(data.tokenizer, BpeConfig):
        texts = (_record_text(record) for _, record, _ in lines)
        tokenizer = train_bpe(texts, data.tokenizer)
    else:
        tokenizer = load_tokenizer(data.tokenizer, model_tokenizer)
    path = cache / f"prompts-{vocabulary_digest(tokenizer)[:16]}" / TOKENIZER_FILE
    publish_file(path, tokenizer.to_json())
    original = path if isinstance(data.tokenizer, BpeConfig) else locate_tokenizer(data.tokenizer, model_tokenizer)
    room, end_of_turn = data.sequence_length - max_new_tokens, None
    with contextlib.ExitStack() as stack:
        chat = None
        if any(not isinstance(record[PROMPT], str) for _, record, _ in lines):
            end_token = end_of_text(original, tokenizer.eos_id)
            chat = stack.enter_context(open_chat(OF_MODEL, tokenizer.backend, end_token, original.parent))
            end_of_turn = chat.end_of_turn
        records = []
        for place, record, ignore in lines:
            try:
                records.append(encode_prompt(place, record, tokenizer, chat, ignore))
            except DataError as exc:
                raise DataError(f"{place}: {exc}") from exc
    _check_room(records, room)
    held_out = [_is_held_out(prompt, seed, data.validation_share) for prompt in records]
    train = [prompt for prompt, is_held in zip(records, held_out, strict=True) if not is_held]
    if not train:
        raise DataError(f"data.prompts: none of {len(records)} prompts is left for training; add prompts").with_facts(
            code="PHX-I012", do="add prompts"
        )
    validation = [prompt for prompt, is_kept in zip(records, held_out, strict=True) if is_kept]
    return PromptSet(tokenizer, path, train, validation[: data.max_validation_sequences], end_of_turn)


def _read_prompt_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        note_file_read(path)
        content = path.read_bytes()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); give a file of JSON lines").with_facts(
            code="PHX-I011", file=str(path)
        ) from exc
    rows = []
    for number, text_line in enumerate(content.splitlines(), start=1):
        if not text_line.strip():
            continue
        place = f"{path}, line {number}"
        record = parse_object(text_line, place)
        if not isinstance(record.get(PROMPT), str | list) or not record[PROMPT]:
            raise DataError(f'{place}: has no "{PROMPT}"; every line is an object with a text, or a list of messages')
        try:
            canonical_json(record)
        except ValueError as exc:
            raise DataError(
                f"{place}: holds NaN, an infinite number or a lone surrogate, which is not JSON; correct that line"
            ) from exc
        rows.append((place, record))
    if not rows:
        raise DataError(f'{path}: has no prompt; every line is an object with a text "{PROMPT}"')
    return rows


def _record_text(record: Mapping[str, Any]) -> str:
    """All texts of a line, for a vocabulary."""
    messages = record[PROMPT] if isinstance(record[PROMPT], list) else []
    turns = [message.get("content") for message in messages if isinstance(message, dict)]
    return "".join(text for text in (*record.values(), *turns) if isinstance(text, str))


def encode_prompt(
    where: str,
    record: Mapping[str, Any],
    tokenizer: TextTokenizer,
    chat: ChatEncoder | None,
    ignore: Collection[str] = (),
) -> PromptRecord:
    """Encode the prompt of one line, up to where the model begins to write.

    Args:
        chat: Encodes prompts that are conversations; None where there is none.
    """
    text = record[PROMPT]
    if isinstance(text, str) or chat is None:
        return PromptRecord(where, text, tuple(tokenizer.encode_prompt(text)), record)
    asked = parse_prompt(record, ignore)
    if asked.messages[-1].role == "assistant":
        raise DataError("its last message is the assistant's, but the model must answer; remove that message")
    ids = chat.encode_prompt(asked.messages, asked.tools)
    return PromptRecord(where, tokenizer.backend.decode(ids, skip_special_tokens=False), tuple(ids), record, asked)


def _check_room(records: Sequence[PromptRecord], room: int) -> None:
    for prompt in records:
        if len(prompt.ids) > room:
            raise DataError(
                f"{prompt.where}: the prompt has {len(prompt.ids)} tokens, but data.sequence_length minus "
                f"max_new_tokens leaves {room}; shorten it, or raise data.sequence_length"
            )


def _is_held_out(prompt: PromptRecord, seed: int, share: float) -> bool:
    """By content and seed, so that equal prompts are on one side."""
    digest = hashlib.sha256(f"phalanx prompt {seed} {prompt.text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
