"""Write the parts of the documentation that the code determines.

``python scripts/generated_pages.py`` writes `docs/support.md` from the kinds of runs and the support matrix,
`docs/output_files.md` from the code that writes these files, the drawing of floors in `docs/architecture.md` from
the import contract, the names of metrics in `docs/watching.md` from their classes, the roles of commands and calls in
`docs/roles.md` from `policy/rights.py`, and in `docs/configuration.md` the names of attacks from their table and rows
for new keys from their docstrings. A test compares them with the files.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from config_sections import with_new_keys

from phalanx.lab.attacks import ATTACKS
from phalanx.policy import CALLS, COMMANDS, FOUR_EYES, ROLES, Right
from phalanx.split.channel.turn_messages import ClientAppraised, ClientEvidenceRefused
from phalanx.train import RUN_TYPES
from phalanx.train.batches.preferences import PreferenceScores
from phalanx.train.batches.scores import Scores
from phalanx.train.runs.base import BaseRun
from phalanx.train.runs.support import ABSENT_SECTIONS, SECTIONS, limits, sections_of
from phalanx.train.sessions.split_parties import EXCLUDED, REFUSED
from phalanx.watch.training_metrics import metric_table

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "phalanx"
DOCS = ROOT / "docs"
METRICS = ("<!-- training metrics: generated -->\n", "<!-- end of training metrics -->\n")
RIGHTS = ("<!-- rights: generated -->\n", "<!-- end of rights -->\n")
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

_OUTPUT = """# What a run writes

Every key of a line of `metrics.jsonl`, every key of `summary.json`, and every kind of event in `events.jsonl`.
`python scripts/generated_pages.py` finds them in the code and takes their meanings from `scripts/output_keys.toml`; a
test compares this page. A key that a run has no use for is left out or null. Lines of `events.jsonl` are signed and
chained, and some have keys that prove something: [the audit log](audit_log.md).

"""
_WRITERS = {
    "metrics": {
        "train/records/record.py": ("record_step",),
        "train/records/device_use.py": ("usage_figures",),
        "train/batches/scores.py": ("metrics_row", "validation_row"),
        "train/batches/leak_meter.py": ("metrics_row",),
        "train/batches/private.py": ("charged_figures",),
        "train/batches/rollouts.py": ("_sum_up_draw",),
        "train/engines/federated_engine.py": ("_note_round",),
        "train/sessions/split_parties.py": ("__init__",),
        "telemetry/metrics.py": ("append_record",),
    },
    "summary": {
        "train/records/summary.py": (
            *("summarise_run", "_reward_fields", "_ending_fields", "_preference_fields", "_optional_sections"),
        ),
        "train/records/trust.py": ("trust_figures",),
        "train/sessions/session.py": ("_leave_summary",),
    },
}
_NO_KEYS = {
    "metrics": {"refusals", "excluded", "asked", "lost", "norm", "round", "sums"},
    "summary": {"", "_first"},
}
"""Keys of other objects that the same functions make."""
_TOLD_BY_ENCLAVES = (ClientAppraised.kind, ClientEvidenceRefused.kind, EXCLUDED, REFUSED)
_OBSERVERS = {"observe", "observe_event", "append_event", "log_event", "write_entry"}


def main() -> None:
    """Write every generated part."""
    (DOCS / "support.md").write_text(support_page(), encoding="utf-8")
    (DOCS / "output_files.md").write_text(output_page(), encoding="utf-8")
    page = DOCS / "architecture.md"
    page.write_text(with_floors(page.read_text(encoding="utf-8")), encoding="utf-8")
    page = DOCS / "watching.md"
    page.write_text(with_metrics(page.read_text(encoding="utf-8")), encoding="utf-8")
    page = DOCS / "configuration.md"
    page.write_text(with_new_keys(with_attacks(page.read_text(encoding="utf-8"))), encoding="utf-8")
    page = DOCS / "roles.md"
    page.write_text(with_rights(page.read_text(encoding="utf-8")), encoding="utf-8")


def with_rights(page: str) -> str:
    """Return the page of roles with its tables."""
    before, rest = page.split(RIGHTS[0])
    commands = [[f"`phalanx {name}`", *_right_cells(right)] for name, right in sorted(COMMANDS.items())]
    calls = [[f"`{name}`", _right_cells(right)[0]] for name, right in sorted(CALLS.items())]
    approvers = [[f"`{action}`", ", ".join(f"`{role}`" for role in roles)] for action, roles in FOUR_EYES.items()]
    tables = (
        _table(["role", "whose"], [[f"`{role}`", meaning] for role, meaning in ROLES.items()]),
        "\n",
        _table(["act", "a second person with one of these roles approves"], approvers),
        "\n## Commands\n\n",
        _table(["command", "one of these roles", "act that needs two people"], commands),
        "\n## Remote calls\n\n",
        _table(["call, and all below it", "one of these roles"], calls),
    )
    return "".join((before, RIGHTS[0], *tables, RIGHTS[1], rest.split(RIGHTS[1])[1]))


def _right_cells(right: Right) -> tuple[str, str]:
    return ", ".join(f"`{role}`" for role in right.roles) or "anyone", f"`{right.action}`" if right.action else "-"


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


def output_page() -> str:
    """Return the page of metrics, summary and events.

    Raises:
        ValueError: A key has no meaning, or a meaning has no key.
    """
    meanings = tomllib.loads((ROOT / "scripts" / "output_keys.toml").read_text(encoding="utf-8"))
    keys = {
        **{name: _written_keys(writers) - _NO_KEYS[name] for name, writers in _WRITERS.items()},
        "events": _event_kinds(),
    }
    keys["metrics"] |= {f"validation_{field.name}" for kind in (Scores, PreferenceScores) for field in fields(kind)}
    for name, found in keys.items():
        if found ^ meanings[name].keys():
            raise ValueError(
                f"output_keys.toml: [{name}]: {sorted(found ^ meanings[name].keys())} differ from the code"
            )
    titles = {"metrics": "`metrics.jsonl`", "summary": "`summary.json`", "events": "`events.jsonl`: kinds of events"}
    tables = (
        f"## {title}\n\n{_table(['key', 'meaning'], [[f'`{key}`', text] for key, text in meanings[name].items()])}"
        for name, title in titles.items()
    )
    return _OUTPUT + "\n".join(tables)


def _written_keys(writers: dict[str, tuple[str, ...]]) -> set[str]:
    """Return the keys of the objects that functions make, whichever of them a run has."""
    keys = set()
    for path, names in writers.items():
        tree = ast.parse((SOURCE / path).read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name in names:
                keys |= _keys_in(function)
    return keys


def _keys_in(node: ast.AST) -> set[str]:
    """Return constant keys of displays and of assignments to a key; keys of values inside them are no columns."""
    keys: set[str] = set()
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant):
        return {str(node.slice.value)}
    inner: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Dict):
        keys = {str(key.value) for key in node.keys if isinstance(key, ast.Constant) and "/" not in str(key.value)}
        inner = [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
    elif isinstance(node, ast.DictComp | ast.Call) and not _writes(node):
        return set()
    return keys.union(*map(_keys_in, inner))


def _writes(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append_record"


def _event_kinds() -> set[str]:
    """Return the kinds of events that any part of a run writes."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] in ("train", "pipeline", "security", "split")
    ]
    names = {
        target.id: node.value.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    kinds = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and len(node.args) > 1:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called.strip("_") in _OBSERVERS:
                first = node.args[0]
                choices = (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,)
                kinds |= {
                    choice.value if isinstance(choice, ast.Constant) else names.get(getattr(choice, "id", ""))
                    for choice in choices
                }
    return {kind for kind in kinds if isinstance(kind, str) and kind.replace("_", "").isalpha()} | {*_TOLD_BY_ENCLAVES}


def with_floors(page: str) -> str:
    """Return the page of the architecture with the drawing of floors as the import contract has them."""
    return _replace_part(page, FLOORS, f"\n```\n{''.join(_floors())}```\n\n")


def with_metrics(page: str) -> str:
    """Return the page of watching with the table of metrics as their classes have them."""
    return _replace_part(page, METRICS, f"\n{metric_table()}\n\n")


def with_attacks(page: str) -> str:
    """Return the page of configuration with the names of attacks as their table has them."""
    names = ", ".join(f"`{name}`" for name in ATTACKS)
    return re.sub(r"(a name in `phalanx\.lab\.attacks\.ATTACKS`: )[^|]*( \|)", rf"\1{names}\2", page)


def _replace_part(page: str, marks: tuple[str, str], part: str) -> str:
    before, _, rest = page.partition(marks[0])
    return f"{before}{marks[0]}{part}{marks[1]}{rest.partition(marks[1])[2]}"


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
    package = SOURCE / name / "__init__.py"
    path = package if package.exists() else package.parent.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    main()
