"""Dialogues in JSON lines, in the shapes that are about; a template makes them text."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from phalanx.data.sources.jsonl import JsonLines
from phalanx.data.sources.records import ColumnSettings, RawRecord, RecordClaims, claims_in, document_of
from phalanx.data.sources.source import Document
from phalanx.data.sources.turns import DialogueTurn, Shape, turns_of
from phalanx.errors import DataError

_TOLD_ROLES = 64


class DialogueConfig(ColumnSettings):
    """Dialogues, one JSON object a line, a file or a directory of ``*.jsonl`` (also ``.gz``, ``.zst``).

    Attributes:
        shape: Shape of the objects; "auto" looks at each.
        turn: The text of one turn, with ``{role}`` and ``{content}``.
    """

    kind: Literal["dialogue"] = "dialogue"
    shape: Shape = "auto"
    turn: str = Field(default="{role}: {content}", min_length=1)
    between: str = "\n\n"

    @model_validator(mode="after")
    def _check_turn(self) -> Self:
        if "{content}" not in self.turn:
            raise ValueError("turn: lacks {content}; use it for the text of a turn")
        return self


class DialogueFiles(JsonLines):
    """One document per line: its turns by the template, roles kept in its fields."""

    def __init__(self, config: DialogueConfig) -> None:
        super().__init__(config, (".jsonl",))
        self._config = config

    def _document_from_object(self, record: RawRecord, content: dict[str, Any]) -> Document:
        try:
            turns = list(turns_of(content, self._config.shape))
            text = self._config.between.join(
                self._render_turn(turn, number) for number, turn in enumerate(turns, start=1)
            )
        except DataError as exc:
            raise DataError(f"{record.name}: {exc}") from exc
        if not turns:
            raise DataError(f"{record.name}: a dialogue without a turn")
        claims = claims_in(content, self._config)
        roles = ",".join(turn.role for turn in turns[:_TOLD_ROLES])
        fields = {**claims.fields, "turns": len(turns), "roles": roles}
        return document_of(record, text, RecordClaims(claims.url, claims.fetched_at, fields=fields))

    def _render_turn(self, turn: DialogueTurn, number: int) -> str:
        if turn.content is None:
            raise DataError(f"turn {number} holds something else than text")
        # the role first: a text that holds {role} stays as it is
        before, _, after = self._config.turn.partition("{content}")
        return before.replace("{role}", turn.role) + turn.content + after.replace("{role}", turn.role)
