"""Rules of a data build; to add one: one file with its config, one line of the table."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Tag

from phalanx.data.rules.bad_words import BadWords, BadWordsConfig
from phalanx.data.rules.length import Length, LengthConfig
from phalanx.data.rules.page import Page
from phalanx.data.rules.pii import Pii, PiiConfig
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
from phalanx.data.rules.secrets import Secrets, SecretsConfig
from phalanx.data.rules.url_blocklist import UrlBlocklist, UrlBlocklistConfig


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
    "bad_words": RuleLine(BadWordsConfig, BadWords),
    "length": RuleLine(LengthConfig, Length),
    "pii": RuleLine(PiiConfig, Pii, "ISO/IEC 7812, ISO 13616, ISO 7064"),
    "secrets": RuleLine(SecretsConfig, Secrets),
    "url_blocklist": RuleLine(UrlBlocklistConfig, UrlBlocklist),
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
