"""How plainly each package speaks: rates of pronoun names, circumlocutions and empty entries, held as upper bounds.

A bound is lowered when a package is rewritten and never raised. ``python tests/test_plain_language.py`` prints today's
rates in the form of `BOUNDS`.
"""

import ast
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "phalanx"
NOT_NOUNS = set(
    [
        "found",
        "one",
        "said",
        "told",
        "known",
        "wanted",
        "own",
        "kept",
        "given",
        "made",
        "most",
        "whole",
        "at",
        "where",
        "words",
        "line",
        "end",
        "about",
        "left",
        "held",
        "there",
        "both",
        "each",
        "those",
    ]
)
"""Pronouns, participles and adverbs that leave a reader without the name of the thing."""
CIRCUMLOCUTION = re.compile(
    r"\b(?:what (?:it|is|was|they|an?|the|of|that|this|every|each|one|has|have|can|comes|came)"
    r"|the one (?:that|which)|those (?:that|which|of)|nothing where)\b"
)
FRAGMENT = re.compile(r"(?:Of|As|By|From|In|For|With|To|Beside|Where|What|Which|How|When|None|So)\b")
ENTRY = re.compile(r"    (\w+)(?: \([^)]*\))?: (.+)")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Rates(NamedTuple):
    """Rates of one package, in percent but for `empty_entries`.

    Attributes:
        names: Assigned variables that have one of `NOT_NOUNS` as their name.
        circumlocutions: Docstrings with a `CIRCUMLOCUTION`.
        fragments: Entries of arguments and attributes that begin as a fragment.
        empty_entries: Number of entries of at most four words, without a digit or a code sample.
        one_word: Functions whose name is one word.
    """

    names: float
    circumlocutions: float
    fragments: float
    empty_entries: int
    one_word: float


AIM = Rates(names=1, circumlocutions=2, fragments=5, empty_entries=0, one_word=35)
BOUNDS = {
    ".": Rates(2, 11, 26, 0, 37),
    "align": Rates(2, 2, 5, 0, 35),
    "checkpoint": Rates(1, 3, 5, 0, 35),
    "config": Rates(1, 4, 5, 0, 35),
    "engine": Rates(1, 8, 6, 0, 35),
    "models": Rates(1, 3, 7, 0, 35),
    "objectives": Rates(1, 2, 9, 0, 35),
    "pipeline": Rates(1, 4, 5, 0, 35),
    "report": Rates(1, 3, 5, 0, 35),
    "rewards": Rates(3, 4, 5, 0, 35),
    "serve": Rates(2, 2, 5, 0, 35),
    "train": Rates(2, 5, 5, 0, 35),
}
MAX_SHARED_NAMES = 20.0
"""Percent of functions whose name is defined five times or more, in the whole tree."""


def entries(docstring: str) -> Iterator[str]:
    """Yield the first line of each entry of a docstring's arguments and attributes."""
    in_section = False
    for row in docstring.splitlines():
        if row and not row[0].isspace():
            in_section = row.strip() in ("Args:", "Attributes:")
        elif in_section and (entry := ENTRY.match(row)):
            yield entry[2]


def is_empty(entry: str) -> bool:
    return len(entry.split()) <= 4 and not re.search(r"[`\d\[\]/%]", entry)


def percent(part: int, total: int) -> float:
    return 100 * part / max(1, total)


@cache
def parse_nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def nodes_of(sources: Iterable[str]) -> list[ast.AST]:
    return [node for source in sources for node in parse_nodes(source)]


def function_names(nodes: Iterable[ast.AST]) -> list[str]:
    return [node.name for node in nodes if isinstance(node, FUNCTIONS) and not node.name.startswith("__")]


def rates(sources: Iterable[str]) -> Rates:
    return rates_of_nodes(nodes_of(sources))


def rates_of_nodes(nodes: list[ast.AST]) -> Rates:
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    documented = [node for node in nodes if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))]
    docstrings = [text for node in documented if (text := ast.get_docstring(node))]
    items = [entry for text in docstrings for entry in entries(text)]
    functions = function_names(nodes)
    single = [name for name in functions if len(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)) == 1]
    return Rates(
        names=percent(sum(name in NOT_NOUNS for name in names), len(names)),
        circumlocutions=percent(sum(bool(CIRCUMLOCUTION.search(text)) for text in docstrings), len(docstrings)),
        fragments=percent(sum(bool(FRAGMENT.match(item)) for item in items), len(items)),
        empty_entries=sum(map(is_empty, items)),
        one_word=percent(len(single), len(functions)),
    )


def shared_names(names: Iterable[str]) -> float:
    counts = Counter(names)
    return percent(sum(count for count in counts.values() if count >= 5), counts.total())


def packages() -> dict[str, list[str]]:
    """Return the sources of each package; those of single modules under ``.``."""
    sources: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        sources.setdefault(parts[0] if len(parts) > 1 else ".", []).append(path.read_text(encoding="utf-8"))
    return sources


@pytest.fixture(scope="module")
def parsed() -> dict[str, tuple[Rates, list[str]]]:
    """The rates of each package and the names of its functions; each file is parsed once."""
    trees = ((package, nodes_of(sources)) for package, sources in packages().items())
    return {package: (rates_of_nodes(nodes), function_names(nodes)) for package, nodes in trees}


@pytest.fixture(scope="module")
def measured(parsed: dict[str, tuple[Rates, list[str]]]) -> dict[str, Rates]:
    return {package: found for package, (found, _) in parsed.items()}


def test_no_package_speaks_less_plainly_than_its_bounds_allow(measured: dict[str, Rates]) -> None:
    above = {
        f"{package}: {kind}": (round(value, 1), bound)
        for package, found in measured.items()
        for kind, value, bound in zip(Rates._fields, found, BOUNDS.get(package, AIM), strict=True)
        if value > bound
    }

    assert above == {}, "rewrite by the style guide: nouns for variables, subject and verb in docstrings"


def test_bounds_name_packages_of_the_tree_alone(measured: dict[str, Rates]) -> None:
    assert BOUNDS.keys() <= measured.keys()


def test_few_functions_share_their_name_with_four_others(parsed: dict[str, tuple[Rates, list[str]]]) -> None:
    assert shared_names(name for _, names in parsed.values() for name in names) <= MAX_SHARED_NAMES


def test_each_kind_of_unclear_language_is_counted() -> None:
    source = '''
def read(path, size):
    """Read what is there.

    Args:
        path: Of the file.
        size: In bytes, at most 10.
    """
    found, content = open(path), None
def read_header(path):
    """Read one header."""
'''

    assert rates([source]) == Rates(names=50.0, circumlocutions=50.0, fragments=100.0, empty_entries=1, one_word=50.0)
    assert shared_names(["read", "read_header"] * 5) == 100.0
    assert shared_names([source] * 4) == 0.0


def methods_without_docstrings(sources: Iterable[str]) -> list[str]:
    """Name each public method without a docstring that overrides nothing in this tree and has no foreign base."""
    classes = {node.name: node for node in nodes_of(sources) if isinstance(node, ast.ClassDef)}

    def is_override(method: str, name: str) -> bool:
        bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in classes[name].bases]
        return any(
            base not in classes
            or any(isinstance(node, FUNCTIONS) and node.name == method for node in classes[base].body)
            or is_override(method, base)
            for base in bases
            if base not in ("object", "Protocol", "Generic", "NamedTuple", "ABC", "BaseModel")
        )

    return [
        f"{name}.{node.name}"
        for name, class_node in classes.items()
        if not name.startswith("_")
        for node in class_node.body
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_")
        if ast.get_docstring(node) is None and not is_override(node.name, name)
    ]


def test_a_public_method_has_a_docstring_unless_it_overrides_one() -> None:
    assert methods_without_docstrings(source for sources in packages().values() for source in sources) == []


def test_the_scan_of_methods_knows_overrides() -> None:
    source = """
class Base:
    def a(self): ...
    def _b(self): ...
class Child(Base):
    def a(self): ...
    def c(self): ...
class Layer(torch.nn.Module):
    def forward(self): ...
class _Private:
    def d(self): ...
"""

    assert methods_without_docstrings([source]) == ["Base.a", "Child.c"]


if __name__ == "__main__":
    for package, sources in packages().items():
        bounds = [max(math.ceil(value), aim) for value, aim in zip(rates(sources), AIM, strict=True)]
        sys.stdout.write(f'    "{package}": Rates({", ".join(map(str, bounds))}),\n')
