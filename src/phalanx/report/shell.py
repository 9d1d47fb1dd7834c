"""The shell of every page around its sections: a head that fetches nothing, and a file that is replaced whole."""

from collections.abc import Sequence
from pathlib import Path

from phalanx.errors import InputError, writing_cure
from phalanx.report.svg import Markup, make_element, style_sheet

# nothing is fetched and no script runs, whatever a file of the run holds
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_shell(title: str, sections: Sequence[Markup]) -> str:
    """Return a whole page around its sections."""
    head = make_element(
        "head",
        {},
        make_element("meta", {"charset": "utf-8"}),
        make_element("meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY}),
        make_element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        make_element("title", {}, title),
        style_sheet("chart.css"),
        style_sheet("page.css"),
    )
    body = make_element("body", {}, make_element("main", {}, *sections))
    return "<!doctype html>\n" + make_element("html", {"lang": "en"}, head, body)


def make_section(title: str, remark: str, *content: str) -> Markup:
    """Return one section with its heading; an empty remark is left out."""
    intro = [make_element("p", {"class": "remark"}, remark)] if remark else []
    return make_element("section", {}, make_element("h2", {}, title), *intro, *map(_wrap_scrollable, content))


def _wrap_scrollable(content: str) -> str:
    """A picture keeps a size at which it can be read, and is moved under a small screen."""
    return make_element("div", {"class": "scroll"}, content) if content.startswith("<svg") else content


def write_page(path: Path, content: str) -> Path:
    """Write a page so that a half-written one is never seen."""
    spare = path.with_name(f"{path.name}.tmp")
    try:
        spare.write_text(content, encoding="utf-8")
        spare.replace(path)
    except OSError as exc:
        raise InputError(f"{path}: cannot be written ({exc.strerror}); {writing_cure(exc)}") from exc
    return path
