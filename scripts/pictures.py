"""Photographs for the documentation: a run's report, a plan, and terminals, each at 1280 and at 390 pixels.

``python scripts/pictures.py RUN_DIR [--terminal NAME=FILE ...]`` writes them into ``docs/images``. RUN_DIR is a
finished run of ``examples/quickstart.toml``, FILE what a command printed, colours included, as ``script`` keeps it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import Browser, ShownPage
from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
MOST_BYTES = 150_000
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
_TERMINAL = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>body {{ margin: 0; background: #11161e }}
pre {{ margin: 0; padding: 14px; color: #e6eaf0; white-space: pre-wrap; overflow-wrap: anywhere;
font: 13px/1.45 "DejaVu Sans Mono", monospace }}</style><pre>{code}</pre>"""


def main() -> int:
    """Take every picture, and say what is wrong on a page."""
    wanted = argparse.ArgumentParser(description=__doc__)
    wanted.add_argument("run_dir", type=Path)
    wanted.add_argument("--terminal", action="append", default=[], metavar="NAME=FILE")
    given = wanted.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pages = {"report": given.run_dir / "report.html", "plan": Path(folder, "plan.html")}
        commands = (["report", str(given.run_dir)], ["plan", *PLAN, "--html", str(pages["plan"])])
        for command in commands:
            subprocess.run(  # noqa: S603 - ours
                [sys.executable, "-m", "phalanx", *command], check=True, stdout=subprocess.DEVNULL
            )
        for name, _, file in (pair.partition("=") for pair in given.terminal):
            pages[name] = Path(folder, f"{name}.html")
            pages[name].write_text(terminal(Path(file).read_text(encoding="utf-8")), encoding="utf-8")
        return photograph(pages)


def photograph(pages: dict[str, Path]) -> int:
    """Write a picture of each page on each screen; return 1 where one is faulty."""
    failed = 0
    with Browser() as browser:
        for name, page in pages.items():
            for suffix, (width, height) in SCREENS.items():
                found = browser.show(page, width)
                to = IMAGES / f"{name}{suffix}.png"
                browser.photograph(to, most_px=height)
                compress(to)
                failed |= found != ShownPage()
                print(to.name, to.stat().st_size, found if found != ShownPage() else "")  # noqa: T201
    return failed


def terminal(printed: str) -> str:
    """Return a page that shows what a terminal did; a line that was written over is left out."""
    lines = [line.rsplit("\r", 1)[-1] for line in printed.replace("\r\n", "\n").split("\n")]
    console = Console(record=True, width=400, file=sys.stderr, quiet=True)
    console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
    return console.export_html(inline_styles=True, code_format=_TERMINAL)


def compress(picture: Path) -> None:
    """Reduce a picture to a palette, without which it is three times as large."""
    program = shutil.which("pngquant")
    if program is None:
        raise SystemExit("pngquant is not installed")
    options = ["--force", "--strip", "--quality=50-95", "--output", picture, "--", picture]
    subprocess.run([program, *options], check=True)  # noqa: S603 - a program of this machine
    if picture.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{picture}: {picture.stat().st_size} bytes, at most {MOST_BYTES} are kept in the repository")


if __name__ == "__main__":
    raise SystemExit(main())
