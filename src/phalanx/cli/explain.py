"""``phalanx explain``: the page of an error's code, or the meaning of a project word; offline."""

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.errors import ConfigError

PAGES, GLOSSARY = "error_pages.md", "glossary.md"
_SECTION = re.compile(r"^## (PHX-[A-Z]\d{3})\n\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_PARTS = re.compile(r"(.+?)\n\n- \*\*Cause\.\*\* (.+?)\n- \*\*Look\.\*\* (.+?)\n- \*\*Cure\.\*\* (.+?)\s*", re.DOTALL)
_CODE = re.compile(r"\[?(?:PHX-)?([A-Z]\d{3})\]?", re.IGNORECASE)
_TERM = re.compile(r"^\| ([a-z][a-z0-9 -]*) \| (.+) \| `([\w/]+\.py)` \| `(\w+)` \|$", re.MULTILINE)
_MAX_NEAR, _MIN_LIKENESS = 6, 0.6


class ErrorPage(NamedTuple):
    """What is known of one kind of error."""

    title: str
    cause: str
    look: str
    cure: str


class Term(NamedTuple):
    """A word of the project."""

    term: str
    meaning: str
    file: str
    name: str


@cache
def error_pages() -> dict[str, ErrorPage]:
    """Read every page, by code."""
    sections = {
        code: _PARTS.fullmatch(body) for code, body in _SECTION.findall(_packaged_path(PAGES).read_text("utf-8"))
    }
    return {
        code: ErrorPage(*(" ".join(part.split()) for part in parts.groups()))
        for code, parts in sections.items()
        if parts
    }


@cache
def read_glossary() -> dict[str, Term]:
    """Read every term, by its words."""
    packaged = _packaged_path(GLOSSARY)
    # a checkout has the page where people read it, and nowhere else
    path = packaged if packaged.is_file() else Path(__file__).resolve().parents[3] / "docs" / GLOSSARY
    text = path.read_text("utf-8") if path.is_file() else ""
    return {_normalise_term(term.term): term for term in (Term(*row) for row in _TERM.findall(text))}


def _complete_word(incomplete: str) -> list[str]:
    codes = [code for code in error_pages() if code.startswith(incomplete.upper())]
    terms = [term.term for term in read_glossary().values() if term.term.startswith(incomplete.lower())]
    return codes + (terms if incomplete else [])


def explain(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE|TERM",
            help="An error code, or a term such as shadow; default: list all.",
            autocompletion=_complete_word,
        ),
    ] = None,
) -> Answer:
    """Explain an error code (cause, where to look, cure), or a term of the terminal and the reports."""
    if word is None:
        return _list_all()
    if _CODE.fullmatch(word.strip()):
        return _explain_code(word)
    key, terms = _normalise_term(word), read_glossary()
    entry = terms.get(key) or terms.get(key.removesuffix("s"))
    if entry is None:
        near = ", ".join(terms[word].term for word in _similar_terms(key, terms))
        do = f"did you mean {near}?" if near else "`phalanx explain` lists all terms"
        raise ConfigError(f"explain: unknown term {word[:40]!r}; {do}").with_facts(
            code="PHX-C002", key="TERM", found=word[:40], do=do
        )
    typer.echo(f"{entry.term}: {entry.meaning}\n\nIn the code: {entry.name}, in phalanx/{entry.file}")
    return Answer(entry._asdict())


def _explain_code(code: str) -> Answer:
    pages, page_code = error_pages(), code.strip().strip("[]").upper()
    page_code = page_code if page_code.startswith("PHX-") else f"PHX-{page_code}"
    if page_code not in pages:
        raise ConfigError(f"explain: unknown code {code[:40]!r}; `phalanx explain` lists all codes").with_facts(
            code="PHX-C002", key="CODE", found=code[:40], do="phalanx explain"
        )
    page = pages[page_code]
    typer.echo(f"{page_code}: {page.title}\n\nCause: {page.cause}\nLook:  {page.look}\nCure:  {page.cure}")
    return Answer({"code": page_code, **page._asdict()})


def _list_all() -> Answer:
    pages, terms = error_pages(), read_glossary()
    for code, page in pages.items():
        typer.echo(f"{code}  {page.title}")
    typer.echo(f"\nterms: {', '.join(term.term for term in terms.values())}")
    titles = {code: page.title for code, page in pages.items()}
    return Answer({"codes": titles, "terms": {term.term: term.meaning for term in terms.values()}})


def _similar_terms(key: str, terms: dict[str, Term]) -> list[str]:
    """Return terms that are spelled alike, or have a word in common."""
    alike = difflib.get_close_matches(key, terms, _MAX_NEAR, _MIN_LIKENESS)
    shared = [term for term in terms if set(term.split()) & set(key.split())]
    return list(dict.fromkeys([*alike, *shared]))[:_MAX_NEAR]


def _normalise_term(text: str) -> str:
    """Return a term as it is looked up: gradient_doubted, Gradient-doubted and gradient doubted are one."""
    return re.sub(r"[\s_-]+", " ", text.strip().lower())


def _packaged_path(name: str) -> Path:
    return Path(__file__).resolve().parent / "answers" / name
