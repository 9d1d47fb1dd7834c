"""A prompt and one answer in tokens, with the labels of the answer alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.closing import Closeable
from phalanx.data.batch import IGNORE
from phalanx.data.chat.encoding import ChatEncoder, open_chat
from phalanx.data.chat.settings import Policy, PreferenceSource
from phalanx.data.preferences.preference import JudgedAnswer, Preference, parse_preference
from phalanx.data.sources.jsonl import JsonLines
from phalanx.data.sources.records import RawRecord, RecordClaims, document_of
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.data.tokenizers.tokenizer import TextTokenizer, end_of_text
from phalanx.errors import DataError


@dataclass(frozen=True)
class EncodedAnswer:
    """A prompt with an answer.

    Attributes:
        ids: Up to the token that ends the answer.
        labels: Already shifted; IGNORE outside the answer.
        num_first: Leading tokens that the tokenizer writes before every text; no cut takes them.
    """

    ids: list[int]
    labels: list[int]
    max_tokens: int
    num_first: int = 0

    @property
    def num_spare(self) -> int:
        """Prompt tokens that a cut may take: all but the first ones and the last, from which the answer follows."""
        last = next(index for index, label in enumerate(self.labels) if label != IGNORE)
        return max(last - self.num_first, 0)

    def shorten_prompt(self, tokens: int) -> "EncodedAnswer":
        """Return the same answer behind a prompt that lacks so many tokens of its beginning, `num_spare` at most."""
        stop = self.num_first + min(tokens, self.num_spare)
        ids, labels = ([*row[: self.num_first], *row[stop:]] for row in (self.ids, self.labels))
        return replace(self, ids=ids, labels=labels)

    def cut_tokens(self, tokens: int) -> "EncodedAnswer":
        """Return its first tokens; nothing is said of the one behind the last of them."""
        if len(self.ids) <= tokens:
            return self
        return replace(self, ids=self.ids[:tokens], labels=[*self.labels[: tokens - 1], IGNORE])


class AnswerEncoder(Closeable):
    """An encoder of prompts that are plain text, or conversations by a chat template.

    Args:
        path: Its ``tokenizer.json``, beside which a model's template lies.
    """

    def __init__(self, template: str, tokenizer: TextTokenizer, path: Path, tokens: int) -> None:
        self.tokens = tokens
        self._tokenizer, self._template, self._path = tokenizer, template, path
        self._chat: ChatEncoder | None = None

    def encode_with_prompt(self, name: str, one: Preference, answer: JudgedAnswer) -> EncodedAnswer:
        """Encode a prompt with an answer."""
        try:
            return (
                self._encode_messages(one, answer) if one.messages else self._encode_text(one.text, answer.plain_text)
            )
        except DataError as exc:
            raise DataError(f"{name}: {exc}") from exc

    @property
    def chat_encoder(self) -> ChatEncoder | None:
        """What has written conversations; None where no prompt was one."""
        return self._chat

    def close(self) -> None:
        if self._chat is not None:
            self._chat.close()

    def _encode_text(self, prompt: str, answer: str) -> EncodedAnswer:
        token_ids, border = self._tokenizer.encode_pair(prompt, answer)
        ids = [*token_ids, self._tokenizer.eos_id]
        # a first token that reaches over the border of the whole has none before it to be learned at
        begins = max(border, 1)
        labels = [*[IGNORE] * (begins - 1), *ids[begins:], IGNORE]
        return EncodedAnswer(ids, labels, self.tokens, self._num_first(ids))

    def _encode_messages(self, one: Preference, answer: JudgedAnswer) -> EncodedAnswer:
        if self._chat is None:
            ends = end_of_text(self._path, self._tokenizer.eos_id)
            self._chat = open_chat(self._template, self._tokenizer.backend, ends, self._path.parent)
        # of the prompt nothing is learned, and templates may leave earlier thoughts out
        before = [message.model_copy(update={"weight": 1.0}) for message in one.messages]
        encoded = self._chat.encode_answer(before, answer.as_messages, one.tools)
        ids, labels = encoded.ids.tolist(), encoded.target_labels.tolist()
        last = max((index for index, label in enumerate(labels) if label != IGNORE), default=None)
        if last is None:
            raise DataError("the chat template leaves no token of the answer to learn; use another template")
        # what the template writes behind the answer nobody says
        return EncodedAnswer(ids[: last + 2], [*labels[: last + 1], IGNORE], self.tokens, self._num_first(ids))

    def _num_first(self, ids: list[int]) -> int:
        first_ids = self._tokenizer.first_ids
        return len(first_ids) if tuple(ids[: len(first_ids)]) == first_ids else 0


class PreferenceFiles(JsonLines):
    """One preference per line; other lines are an error, or are left out and counted."""

    def __init__(self, config: PreferenceSource, broken: Policy) -> None:
        super().__init__(config, (".jsonl",))
        self._config, self._broken = config, broken
        self.num_dropped = 0

    def read_preferences(self) -> Iterator[tuple[str, Preference]]:
        """Every preference with the name of its line, files by name and lines in order."""
        self.num_dropped = 0
        for file in self.files:
            for record in self._cut_file(file, str(file.path)):
                result = record if isinstance(record, BrokenRecord) else self._convert_record(record)
                if isinstance(result, Document):
                    yield result.name, Preference.model_validate_json(result.text)
                elif result.is_unsupported:
                    continue
                elif self._broken == "refuse":
                    raise DataError(f"{result.name}: {result.reason}").with_facts(
                        code="PHX-I014", file=result.name, found=result.reason, expected="a preference a line"
                    )
                else:
                    self.num_dropped += 1

    def _document_from_object(self, record: RawRecord, content: dict[str, Any]) -> Document:
        preference = parse_preference(content, self._config.shape, self._config.ignore)
        return document_of(record, preference.model_dump_json(), RecordClaims())
