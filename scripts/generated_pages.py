"""Write the parts of the documentation that the code determines.

``python scripts/generated_pages.py`` writes `docs/support.md` from the kinds of runs and the support matrix, and the
drawing of floors in `docs/architecture.md` from the import contract. A test compares both with the files.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from phalanx.train import RUN_TYPES
from phalanx.train.runs.base import BaseRun
from phalanx.train.runs.support import ABSENT_SECTIONS, SECTIONS, limits, sections_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FLOORS = ("<!-- floors: generated -->\n", "<!-- end of floors -->\n")
_SUPPORT = """# What each engine supports

A run file describes one of four kinds of runs; the section of its engine says which.
`python scripts/generated_pages.py` writes this page from the types in `train/runs/` and
from `train/runs/support.py`, and a test compares them.

| kind | section of the engine | variant |
|---|---|---|
| `PipelineRun` | `[pipeline]`, or none of the others | |
| `DomainRun` | `[parallel]` | with `[deepspeed]` ranks share by DeepSpeed |
| `SplitRun` | `[split]` | `SplitPipelineRun`: with `[pipeline]` the enclave owns one |
| `FederatedRun` | `[federated]` | `FederatedRankRun`: with `[parallel]` a site trains by ranks |
| | | `FederatedPipelineRun`: with `[pipeline]` a site owns one |

## Sections

A section counts by being there, whatever it holds: a `[guard]` that repeats every default was asked for, and is
refused beside `[parallel]` instead of dropped. `config.toml` in a run directory has the sections of the run's kind
only.

"""
_VALUES = """
## Values

Values of keys that an engine lacks. A run has all rows of its sections: one with `[parallel]` and `[deepspeed]` those
of both.

"""


def main() -> None:
    """Write every generated part."""
    (DOCS / "support.md").write_text(support_page(), encoding="utf-8")
    page = DOCS / "architecture.md"
    page.write_text(with_floors(page.read_text(encoding="utf-8")), encoding="utf-8")


def support_page() -> str:
    """Return the page of kinds of runs, their sections, and values that they lack."""
    kinds = {kind.__name__: kind for kind in RUN_TYPES.members}
    sections = [[f"`[{section}]`", *(_presence(kind, section) for kind in kinds.values())] for section in SECTIONS]
    reasons = [
        [f"`{sections_of(engine)}`", f"`[{section}]`", reason]
        for engine, absent in ABSENT_SECTIONS.items()
        for section, reason in absent.items()
    ]
    return "".join(
        (
            _SUPPORT,
            _table(["section", *(f"`{name}`" for name in kinds)], sections),
            "\n",
            _table(["engine", "lacks", "because"], reasons),
            _VALUES,
            _table(["key", "engine", "lacks", "because", "do"], list(_values())),
        )
    )


def _presence(kind: type[BaseRun], section: str) -> str:
    field = kind.model_fields.get(section)
    return "-" if field is None else "required" if field.is_required() else "yes"


def _values() -> Iterator[list[str]]:
    """Yield a row for each key, engine and reason; the lacking values that share these stand together."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for engine, key, limit in limits():
        rows.setdefault((key, engine, limit.reason, limit.instead), []).append(limit.lacking)
    for (key, engine, reason, instead), lacking in rows.items():
        yield [f"`{key}`", f"`{sections_of(engine)}`", ", ".join(lacking), reason, instead]


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_floors(page: str) -> str:
    """Return the page of the architecture with the drawing of floors as the import contract has them."""
    before, _, rest = page.partition(FLOORS[0])
    _, _, after = rest.partition(FLOORS[1])
    return f"{before}{FLOORS[0]}\n```\n{''.join(_floors())}```\n\n{FLOORS[1]}{after}"


def _floors() -> Iterator[str]:
    """Yield a line for each package, from the top; those after a bar stand on the same floor."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "floors")
    for layer in layers:
        for number, name in enumerate(layer.split(" | ")):
            yield f"{'| ' if number else ''}{name}".ljust(18) + f"{_purpose(name)}\n"


def _purpose(name: str) -> str:
    """Return the first line of a package's or module's docstring."""
    package = ROOT / "src" / "phalanx" / name / "__init__.py"
    path = package if package.exists() else package.parent.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    main()
