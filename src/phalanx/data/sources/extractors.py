"""The libraries that extract the text of a page, and the limits of each."""

import importlib
from collections.abc import Callable

from phalanx.errors import DataError

Extract = Callable[[str], str]


def _load_resiliparse(*, main_content: bool) -> Extract:
    extract: Callable[..., str] = importlib.import_module("resiliparse.extract.html2text").extract_plain_text
    return lambda page: extract(page, main_content=main_content)


def _load_trafilatura(*, main_content: bool) -> Extract:
    del main_content
    extract: Callable[..., str | None] = importlib.import_module("trafilatura").extract
    return lambda page: extract(page, fast=True, include_comments=False) or ""


def extract_with(extract: Extract, page: str) -> str:
    """Return the text that a library takes out of a page."""
    try:
        return extract(page)
    except Exception as exc:
        # a page of the web stands against libraries for pages of the web
        raise DataError(f"cannot read it ({type(exc).__name__})") from exc


EXTRACTORS: dict[str, Callable[..., Extract]] = {"resiliparse": _load_resiliparse, "trafilatura": _load_trafilatura}
CPU_SECONDS = {"resiliparse": (1, 4), "trafilatura": (5, 40)}
"""Of a processor for any page, and for each MiB of it: six times what the costliest page for people took."""
