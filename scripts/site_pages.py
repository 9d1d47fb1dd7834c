"""A hook of mkdocs: pages that are made from the code, and links that leave the documentation.

The reference of commands is what ``phalanx --help`` knows, the page of decisions lists the folder's titles, so that
none of them is written twice.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import phalanx
from phalanx.cli.answers.tree import EXIT_CODES
from phalanx.cli.outcome import command as phalanx_command

_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+((?:src|tests|examples|benchmarks|scripts)/[^)#]*|[A-Z]+\.md)[^)]*\)")
_ERRORS = Path(phalanx.__file__).parent / "cli" / "answers" / "error_pages.md"
_CODE = re.compile(r"<code>[^<\n]+</code>")
_HYPHENED = re.compile(r"(?<=[ >])(?=[^ <>]{2,24}[ <])([^ <>]*-[^ <>]*)")
_PYTHON = """# Python

A run is a call; the rest is in the run file.

::: phalanx.train.entry.train

::: phalanx.train.config.load_run

## Simulators for your own tests

A whole verified run in one process, with parties that lie or die on cue.

::: phalanx.testing.MemoryCompany

::: phalanx.testing.Actor
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
            lines += ["| | | default |", "|---|---|---|", *rows, ""]
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
    told = "required" if parameter.required else "" if default in (None, False, (), []) else f"`{default}`"
    return f"| `{shown}{wants}` | {_cell(getattr(parameter, 'help', None) or '')} | {_cell(told)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _decisions(docs: Path) -> str:
    lines = ["# Decisions", "", "One page each: what was chosen, against what, and why.", ""]
    for path in sorted((docs / "adr").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"
