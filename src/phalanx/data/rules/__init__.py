"""Rules of a data build; to add one: one file with its config, one line of the table."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Tag

from phalanx.data.rules.length import Length, LengthConfig
from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import (
    CorpusRule,
    DocumentRule,
    Drop,
    Edit,
    Outcome,
    Quarantine,
    Rule,
    RuleReason,
    RuleSettings,
    Texts,
)
from phalanx.data.rules.rule import Tag as Tagged


@dataclass(frozen=True)
class RuleLine:
    """One line of the table.

    Attributes:
        config: What a recipe says of it; its `kind` is the name.
        make: Builds it; an extra that is missing is a DataError that names it.
        reference: Where the rule is from.
    """

    config: type[RuleSettings]
    make: Callable[[Any], Rule]
    reference: str = ""


RULES: dict[str, RuleLine] = {
    "length": RuleLine(LengthConfig, Length),
}


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)


if TYPE_CHECKING:
    RuleConfig = RuleSettings
else:
    # at run time the table alone says which there are
    RuleConfig = Annotated[
        functools.reduce(operator.or_, [Annotated[line.config, Tag(name)] for name, line in RULES.items()]),
        Discriminator(_kind),
    ]


def make_rule(config: RuleConfig) -> Rule:
    """Build a rule from what a recipe says of it.

    Raises:
        DataError: An extra that it needs is missing, or a file that it names.
    """
    return RULES[config.kind].make(config)


__all__ = [
    "RULES",
    "CorpusRule",
    "DocumentRule",
    "Drop",
    "Edit",
    "Length",
    "LengthConfig",
    "Outcome",
    "Page",
    "Quarantine",
    "Rule",
    "RuleConfig",
    "RuleLine",
    "RuleReason",
    "RuleSettings",
    "Tagged",
    "Texts",
    "make_rule",
]
