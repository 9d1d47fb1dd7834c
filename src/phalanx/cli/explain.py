"""``phalanx explain``: the page of an error's code, offline."""

import re
from functools import cache
from typing import Annotated, NamedTuple

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.errors import ConfigError

PAGES = "error_pages.md"
_SECTION = re.compile(r"^## (PHX-[A-Z]\d{3})\n\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_PARTS = re.compile(r"(.+?)\n\n- \*\*Cause\.\*\* (.+?)\n- \*\*Look\.\*\* (.+?)\n- \*\*Cure\.\*\* (.+?)\s*", re.DOTALL)


class ErrorPage(NamedTuple):
    """What is known of one kind of error."""

    title: str
    cause: str
    look: str
    cure: str


@cache
def error_pages() -> dict[str, ErrorPage]:
    """Read every page, by code."""
    from importlib.resources import files

    text = (files("phalanx.cli.answers") / PAGES).read_text(encoding="utf-8")
    found = {code: _PARTS.fullmatch(body) for code, body in _SECTION.findall(text)}
    return {
        code: ErrorPage(*(" ".join(one.split()) for one in parts.groups())) for code, parts in found.items() if parts
    }


def _codes(incomplete: str) -> list[str]:
    return [code for code in error_pages() if code.startswith(incomplete.upper())]


def explain(
    code: Annotated[
        str | None,
        typer.Argument(metavar="CODE", help="As an error ends with; left out: list all.", autocompletion=_codes),
    ] = None,
) -> Answer:
    """Say what an error's code means: its cause, where to look, and its cure."""
    pages = error_pages()
    if code is None:
        for one, page in pages.items():
            typer.echo(f"{one}  {page.title}")
        return Answer({"codes": {one: page.title for one, page in pages.items()}})
    wanted = code.strip("[]").upper()
    wanted = wanted if wanted.startswith("PHX-") else f"PHX-{wanted}"
    if wanted not in pages:
        raise ConfigError(f"explain: no error has the code {code[:40]!r}; `phalanx explain` lists them").about(
            code="PHX-C002", key="CODE", found=code[:40], do="phalanx explain"
        )
    page = pages[wanted]
    typer.echo(f"{wanted}: {page.title}\n\nCause: {page.cause}\nLook:  {page.look}\nCure:  {page.cure}")
    return Answer({"code": wanted, **page._asdict()})
