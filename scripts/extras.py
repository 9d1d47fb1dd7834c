"""Install each extra alone into an environment of its own, by pip's own resolution, and import what it brings.

    python scripts/extras.py              every extra
    python scripts/extras.py lora html    these
    python scripts/extras.py --share 3/8  an eighth of them, which CI takes in turn

What the base installation has (torch above all) is linked from this environment, so that only what an extra adds is
fetched; what other extras have brought into this environment is not seen. Exit code 1 where one fails.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOR_DEVELOPERS = ("dev", "benchmark")
"""Tools and peers of measurements: no part of the package imports them."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_IMPORTS = """
import importlib, importlib.metadata as metadata, sys
wanted = {name.replace("_", "-").lower() for name in sys.argv[1:]}
owners = metadata.packages_distributions()
brought = sorted(top for top, names in owners.items() if top.isidentifier() and not top.startswith("_")
                 and wanted & {name.replace("_", "-").lower() for name in names})
for top in brought:
    if top not in ("docs", "tests", "test", "examples"):
        importlib.import_module(top)
import phalanx.cli, phalanx.train.config
print(" ".join(brought))
"""


def extras() -> dict[str, list[str]]:
    """Each extra that a user may install, with the names of what it asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = project["optional-dependencies"]
    return {name: [_name(one) for one in wanted] for name, wanted in found.items() if name not in FOR_DEVELOPERS}


def shared(names: Sequence[str], share: str) -> list[str]:
    """Return one part of so many, such as 3/8; all parts together are all names."""
    part, of = (int(number) for number in share.split("/"))
    return [name for place, name in enumerate(names) if place % of == part % of]


def base_distributions() -> Iterator[metadata.Distribution]:
    """What the package needs without any extra, and what that needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    left, seen = [_name(one) for one in project["dependencies"]], set[str]()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            # of another system, or of an extra
            continue
        yield found
        left += [_name(one) for one in found.requires or () if "extra ==" not in one]


def link_base(folder: Path) -> None:
    """Link the files of the base installation, package by package, into a folder."""
    for found in base_distributions():
        tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            source, target = Path(str(found.locate_file(top))), folder / top
            if not target.exists() and source.exists():
                target.symlink_to(source)


def check(extra: str, wanted: Sequence[str]) -> str | None:
    """Install one extra and import it; return what went wrong, None where nothing did."""
    with tempfile.TemporaryDirectory(prefix=f"extra-{extra}-") as spare:
        home, base = Path(spare) / "env", Path(spare) / "base"
        base.mkdir()
        venv.create(home, with_pip=True)
        python = home / "bin" / "python"
        site = next((home / "lib").glob("python*/site-packages"))
        link_base(base)
        (site / "base.pth").write_text(f"{base}\n", encoding="utf-8")
        steps = (
            [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{ROOT}[{extra}]"],
            [python, "-c", _IMPORTS, *wanted],
        )
        for step in steps:
            command = list(map(str, step))
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)  # noqa: S603 - ours
            if done.returncode:
                return "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        _say(f"{extra}: installs alone and imports {done.stdout.strip()}")
    return None


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    return "" if found is None else found[0].lower().replace("_", "-")


def main() -> int:
    """Check the extras that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="EXTRA")
    parser.add_argument("--share", default="0/1", metavar="I/N")
    given, known = parser.parse_args(), extras()
    unknown = set(given.names) - set(known)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no extra; choose of {', '.join(known)}")
    failed = {}
    for name in given.names or shared(list(known), given.share):
        reason = check(name, known[name])
        if reason is not None:
            failed[name] = reason
            _say(f"{name}: FAILED\n{reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
