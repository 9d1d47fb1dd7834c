"""Constrained text: JSON schema, regular expression or Lark grammar, by llguidance, with bounds on size and time."""

import importlib.util
import json
import threading
from typing import TYPE_CHECKING, Any

from phalanx.errors import ModelError
from phalanx.serve.engine.request import BadRequestError, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_SCHEMA_NODES = 2048
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class GrammarState:
    """One text on its way through a grammar."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def allowed_bits(self) -> bytes:
        """Return one bit a token, the lowest first: which ones may follow.

        Raises:
            BadRequestError: The grammar takes more than its bounds.
        """
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().splitlines()[0]
            raise BadRequestError(f"the grammar cannot go on: {reason[:200]}", "response_format")
        return bits

    def accept_token(self, token: int) -> None:
        """Go on by a token that was allowed."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end of the text; a grammar beyond its bounds is not complete."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


class GrammarCompiler:
    """Grammars over the vocabulary of one tokenizer, which is prepared at the first use."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends
        self._prepared: LLTokenizer | None = None
        self._turn = threading.Lock()

    def compile_grammar(self, grammar: Grammar) -> GrammarState:
        """Return a new text's place at the beginning of a grammar.

        Raises:
            BadRequestError: The grammar is malformed, or larger than its bounds.
            ModelError: The package is not installed.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise ModelError("grammars need llguidance, which is not installed; install phalanx-train[grammar]")
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  -- an extra

        try:
            source = _source_of(grammar)
        except ValueError as exc:
            raise BadRequestError(f"the schema is no JSON schema: {str(exc)[:200]}", "response_format") from exc
        with self._turn:
            prepared = self._prepared = self._prepared or self._prepare_tokenizer()
        matcher = LLMatcher(prepared, source, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            first = matcher.get_error().strip().splitlines()[0]
            raise BadRequestError(f"the grammar is refused: {first[:200]}", "response_format")
        return GrammarState(matcher)

    def _prepare_tokenizer(self) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer  # noqa: PLC0415  -- an extra

        return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._ends) or None)


def _source_of(grammar: Grammar) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415  -- an extra

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.source)
    schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.source)
    if _count_nodes(schema) > _MAX_SCHEMA_NODES:
        raise BadRequestError(f"the schema has more than {_MAX_SCHEMA_NODES} nodes; make it smaller", "response_format")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise BadRequestError("x-guidance: sets options of the compiler; take it out of the schema", "response_format")
    # as Python's json writes; free white space would let a model write it without end
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def _count_nodes(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_count_nodes, value.values()))
    return 1 + sum(map(_count_nodes, value)) if isinstance(value, list) else 1
