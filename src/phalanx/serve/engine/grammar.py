"""Constrained text: JSON schema, regular expression or Lark grammar, by llguidance, with bounds on size and time."""

import importlib.util
import json
import math
import threading
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from phalanx.errors import ModelError
from phalanx.serve.engine.request import BadRequestError, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_SCHEMA_NODES = 2048
_MAX_MULTIPLE = 100_000
"""An automaton has a state for each remainder: beyond it seconds and hundreds of megabytes."""
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

    def copy(self) -> "GrammarState":
        """Return the place of another text, which goes on by itself."""
        return GrammarState(self._matcher.deep_copy())

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
        prepared = self.prepare_tokenizer()
        matcher = LLMatcher(prepared, source, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            first = matcher.get_error().strip().splitlines()[0]
            raise BadRequestError(f"the grammar is refused: {first[:200]}", "response_format")
        return GrammarState(matcher)

    def prepare_tokenizer(self) -> "LLTokenizer":
        """Return the vocabulary as llguidance takes it, which is prepared once; the package must be installed."""
        from llguidance.hf import from_tokenizer  # noqa: PLC0415  -- an extra

        with self._turn:
            if self._prepared is None:
                ends = sorted(self._ends) or None
                self._prepared = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=ends)
            return self._prepared


def _source_of(grammar: Grammar) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415  -- an extra

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.source)
    schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.source)
    check_schema(schema)
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise BadRequestError("x-guidance: sets options of the compiler; take it out of the schema", "response_format")
    # as Python's json writes; free white space would let a model write it without end
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def check_schema(schema: object) -> None:
    """Check the bounds of a client's schema.

    Raises:
        BadRequestError: It has too many nodes, or too large a number in ``multipleOf``.
    """
    nodes = list(_walk_nodes(schema))
    if len(nodes) > _MAX_SCHEMA_NODES:
        raise BadRequestError(f"the schema has more than {_MAX_SCHEMA_NODES} nodes; make it smaller", "response_format")
    factors = [Decimal(str(node["multipleOf"])) for node in nodes if _has_factor(node)]
    if factors and _common_multiple(factors) > _MAX_MULTIPLE:
        message = f"multipleOf: the least common multiple is above {_MAX_MULTIPLE}; use smaller numbers"
        raise BadRequestError(message, "response_format")


def _walk_nodes(value: object) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, dict | list):
            waiting.extend(node.values() if isinstance(node, dict) else node)


def _has_factor(node: object) -> bool:
    factor = node.get("multipleOf") if isinstance(node, dict) else None
    return isinstance(factor, int | float) and not isinstance(factor, bool) and factor > 0


def _common_multiple(factors: list[Decimal]) -> int:
    """Return the least common multiple, in units of the last decimal that one of the numbers has."""
    if not all(factor.is_finite() for factor in factors):
        return _MAX_MULTIPLE + 1
    digits = [factor.normalize().as_tuple() for factor in factors]
    last = min(0, *(int(parts.exponent) for parts in digits))
    if any(int(parts.exponent) - last + len(parts.digits) > len(str(_MAX_MULTIPLE)) for parts in digits):
        return _MAX_MULTIPLE + 1
    return math.lcm(*(int(factor.scaleb(-last)) for factor in factors))
