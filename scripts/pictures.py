"""Photographs for the documentation: reports of a run and a dataset, a plan, and terminals, at 1280 and 390 pixels.

``python scripts/pictures.py [RUN_DIR] [--data DIR] [--terminal NAME=FILE ...]`` writes them into ``docs/images``.
RUN_DIR is a finished run of ``examples/quickstart.toml``, DIR a dataset, FILE what a command printed, colours included,
as ``script`` keeps it.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import Browser, ShownPage
from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
MAX_BYTES = 150_000
SCREENS = {"": (1280, 1500), "-small": (390, 1300)}
"""Name, width and the most height of each picture."""
PLAN = [
    "--model",
    "llama-2-70b",
    "--cluster",
    "llama2-rsc",
    "--gpus",
    "512",
    "--tokens",
    "2e12",
    "--sequence-length",
    "4096",
]
_OVER = re.compile(r"\r|\x1b\[2K")
_BESIDE = re.compile(r"^Script (?:started|done) on .*\n?|\x1b\[\?25[lh]|\x1b\[\d*A|\x1b\[49m|\0|\^@", re.MULTILINE)
_TERMINAL = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>body {{ margin: 0; background: #11161e }}
pre {{ margin: 0; padding: 14px; color: #e6eaf0; white-space: pre-wrap; overflow-wrap: anywhere;
font: 13px/1.45 "DejaVu Sans Mono", monospace }}</style><pre>{code}</pre>"""


def main() -> int:
    """Take every picture, and say what is wrong on a page."""
    wanted = argparse.ArgumentParser(description=__doc__)
    wanted.add_argument("run_dir", type=Path, nargs="?", help="left out: terminals alone")
    wanted.add_argument("--terminal", action="append", default=[], metavar="NAME=FILE")
    wanted.add_argument("--data", type=Path, metavar="DIR", help="a dataset")
    given = wanted.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pages = {} if given.run_dir is None else written(given.run_dir, Path(folder))
        if given.data is not None:
            pages["data-report"] = given.data / "report.html"
        for name, _, file in (pair.partition("=") for pair in given.terminal):
            pages[name] = Path(folder, f"{name}.html")
            pages[name].write_text(terminal(Path(file).read_bytes().decode()), encoding="utf-8")
        return photograph(pages)


def written(run_dir: Path, folder: Path) -> dict[str, Path]:
    """Write the report of a run and the page of a plan anew, and return where they are."""
    pages = {"report": run_dir / "report.html", "plan": folder / "plan.html"}
    for command in (["report", str(run_dir)], ["plan", *PLAN, "--html", str(pages["plan"])]):
        program = [sys.executable, "-m", "phalanx", *command]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - ours
    return pages


def photograph(pages: dict[str, Path]) -> int:
    """Write a picture of each page on each screen; return 1 where one is faulty."""
    failed = 0
    with Browser() as browser:
        for name, page in pages.items():
            for suffix, (width, height) in SCREENS.items():
                found = browser.show(page, width, height=200)
                to = IMAGES / f"{name}{suffix}.png"
                browser.photograph(to, most_px=height)
                compress(to)
                failed |= found != ShownPage()
                print(to.name, to.stat().st_size, found if found != ShownPage() else "")  # noqa: T201
    return failed


def terminal(printed: str) -> str:
    """Return a page that shows what a terminal did at the end: what was written over is left out."""
    # the terminal's own colour is none to rich: nothing is set any more
    written = _BESIDE.sub("", printed).replace("\r\n", "\n").replace("\x1b[39m", "\x1b[0m")
    lines = [_OVER.split(line)[-1] for line in written.split("\n")]
    console = Console(record=True, width=400, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi("\n".join(lines).strip("\n")), soft_wrap=True)
    return console.export_html(inline_styles=True, code_format=_TERMINAL)


def compress(picture: Path) -> None:
    """Reduce a picture to a palette, without which it is three times as large."""
    program = shutil.which("pngquant")
    if program is None:
        raise SystemExit("pngquant is not installed")
    options = ["--force", "--strip", "--quality=50-95", "--output", picture, "--", picture]
    subprocess.run([program, *options], check=True)  # noqa: S603 - a program of this machine
    if picture.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{picture}: {picture.stat().st_size} bytes, at most {MAX_BYTES} are kept in the repository")


if __name__ == "__main__":
    raise SystemExit(main())
