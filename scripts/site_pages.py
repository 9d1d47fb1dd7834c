"""A hook of mkdocs: pages that are made from the code, and links that leave the documentation.

The reference of commands is what ``phalanx --help`` knows, the page of decisions lists the folder's titles, so that
none of them is written twice.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import phalanx
from phalanx.cli.answers.tree import EXIT_CODES
from phalanx.cli.outcome import build_command as phalanx_command

_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+((?:src|tests|examples|benchmarks|scripts)/[^)#]*|[A-Z]+\.md)[^)]*\)")
_ERRORS = Path(phalanx.__file__).parent / "cli" / "answers" / "error_pages.md"
_CODE = re.compile(r"<code>[^<\n]+</code>")
_HYPHENED = re.compile(r"(?<=[ >])(?=[^ <>]{2,24}[ <])([^ <>]*-[^ <>]*)")
_PYTHON = """# Python

A run is a call; the rest is in the run file.

::: phalanx.notebook.train

::: phalanx.notebook.open_run

::: phalanx.notebook.Run

::: phalanx.train.config.load_run

::: phalanx.report.write_report

## Errors

::: phalanx.errors
    options: { members: false, show_root_heading: false }

## Simulators for your own tests

A whole verified run in one process, with parties that lie or die on cue.

::: phalanx.testing.MemoryCompany

::: phalanx.testing.Actor

::: phalanx.testing.tampering

::: phalanx.testing.crash_at

::: phalanx.testing.Stall

::: phalanx.testing.tiny_run
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that no file holds."""
    pages = {
        "reference/commands.md": _commands(),
        "reference/errors.md": _ERRORS.read_text(encoding="utf-8"),
        "reference/python.md": _PYTHON,
        "adr/index.md": _decisions(Path(config["docs_dir"])),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name a file of the repository instead of linking to it: a site has the pages alone."""
    return _OUTSIDE.sub(
        lambda found: f"{found[1]} (`{found[2]}`)" if f"`{found[2]}`" != found[1] else found[1], markdown
    )


def on_page_content(html: str, **_: Any) -> str:
    """Keep an option or a name in one piece: a browser would break a line behind each hyphen in it."""
    return _CODE.sub(lambda code: _HYPHENED.sub(r'<span class="word">\1</span>', code[0]), html)


def _commands() -> str:
    """Return every command with its arguments and options, in the order of ``phalanx --help``."""
    lines = ["# Commands", "", EXIT_CODES, ""]
    for names, command in _walk(("phalanx",), phalanx_command()):
        lines += ["", f"## {' '.join(names)}", "", command.help or "", ""]
        rows = [_row(parameter) for parameter in command.params if parameter.name not in ("help", "version")]
        if rows:
            lines += ["| argument | meaning | default |", "|---|---|---|", *rows, ""]
        for example in re.findall(r"Example: (.+)", command.epilog or ""):
            lines += ["```", example, "```"]
        own = re.search(r"Exit codes: .+", command.epilog or "")
        if own and own[0] != EXIT_CODES:
            lines += ["", own[0]]
    return "\n".join(lines) + "\n"


def _walk(names: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield names, command
        return
    for name, below in inner.items():
        yield from _walk((*names, name), below)


def _row(parameter: Any) -> str:
    shown = " ".join(parameter.opts) if parameter.opts[0].startswith("-") else parameter.metavar or parameter.name
    wants = f" {parameter.metavar}" if parameter.metavar and parameter.opts[0].startswith("-") else ""
    default = parameter.default
    told = "required" if parameter.required_measures else "" if default in (None, False, (), []) else f"`{default}`"
    return f"| `{shown}{wants}` | {_cell(getattr(parameter, 'help', None) or '')} | {_cell(told)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _decisions(docs: Path) -> str:
    """Return the page of decisions, by topic; those that no topic names yet stand at the end."""
    paths = {int(path.name[:4]): path for path in sorted((docs / "adr").glob("[0-9]*.md"))}
    topics = tomllib.loads((docs / "adr" / "topics.toml").read_text(encoding="utf-8"))
    sorted_in = {number for numbers in topics.values() for number in numbers}
    rest = [number for number in paths if number not in sorted_in]
    lines = ["# Decisions", "", "One page each: what was chosen, against what, and why."]
    for topic, numbers in (topics | ({"Newest": rest} if rest else {})).items():
        lines += ["", f"## {topic}", ""]
        lines += [f"- [{_title(paths[number])}]({paths[number].name})" for number in numbers]
    return "\n".join(lines) + "\n"


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
