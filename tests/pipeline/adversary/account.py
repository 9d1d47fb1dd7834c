"""The account of a search that goes on over many runs: a small file that is committed, by the tree of the protocol."""

import ast
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Self

import acts
from acts import Schedule

from phalanx.lab.bench.measure.machine import describe_machine, load_average

FORMAT = 1
MAX_SEEDS = 48
"""Schedules of a setting that are kept as beginnings of pairs: those that led to most."""
LISTS = ("singles", "crashes", "words", "pairs")
SOURCES = (
    "src/phalanx/pipeline",
    *(f"tests/pipeline/adversary/{name}.py" for name in ("acts", "companies", "generating", "liar", "neighbours")),
    *(f"tests/pipeline/adversary/{name}.py" for name in ("playing", "protocol_page", "searching")),
    "docs/protocol.md",
)
"""What an account is about: the protocol that is played, and what decides the order of lists and what is a finding."""

_VALUES = {
    cls.__name__: cls
    for cls in (acts.Act, acts.Alter, acts.At, acts.Crash, acts.Lie, acts.Say, acts.Schedule, acts.Send, acts.Withhold)
}


def short_text(value: Any) -> str:
    """Write a schedule, or a part of one, as the call that makes it, without fields that have their usual value."""
    if is_dataclass(value) and not isinstance(value, type):
        blank = {each.name: _usual_value(each) for each in fields(value)}
        changed = [(name, getattr(value, name)) for name, usual in blank.items() if getattr(value, name) != usual]
        return f"{type(value).__name__}({', '.join(f'{name}={short_text(each)}' for name, each in changed)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{short_text(key)}: {short_text(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(short_text, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def _usual_value(place: Field[Any]) -> Any:
    return place.default if place.default_factory is MISSING else place.default_factory()


def read_schedule(text: str) -> Schedule:
    """Read what `short_text` writes; nothing but the values of `acts.py` and literals is accepted.

    Raises:
        ValueError: It is something else.
    """
    schedule = _value_of(ast.parse(text, mode="eval").body)
    if not isinstance(schedule, Schedule):
        raise ValueError(f"no schedule: {text[:80]}")  # noqa: TRY004 - the text is wrong, not the caller
    return schedule


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if name in _VALUES:
            return _VALUES[name](**{str(each.arg): _value_of(each.value) for each in keywords})
        case ast.Tuple(elts=parts):
            return tuple(map(_value_of, parts))
        case ast.Dict(keys=keys, values=values):
            return {_value_of(key): _value_of(each) for key, each in zip(keys, values, strict=True) if key is not None}
    return ast.literal_eval(node)


def short_hash(value: Any) -> str:
    """Eight hexadecimal digits that stand for a state; sets count by their sorted entries."""
    return hashlib.blake2b(_sorted_text(value).encode(), digest_size=4).hexdigest()


def _sorted_text(value: Any) -> str:
    if isinstance(value, frozenset | set):
        return f"{{{','.join(sorted(map(_sorted_text, value)))}}}"
    return f"({','.join(map(_sorted_text, value))})" if isinstance(value, tuple) else repr(value)


def digest_sources(root: Path, sources: Iterable[str] = SOURCES) -> str:
    """Digest what the sources do: code without comments, docstrings and layout, and the tables of a page."""
    whole = hashlib.sha256()
    for source in sources:
        here = root / source
        for path in sorted(here.rglob("*.py")) if here.is_dir() else [here]:
            whole.update(f"{path.relative_to(root).as_posix()}\n{_meaning_of(path)}\n".encode())
    return whole.hexdigest()[:40]


def _meaning_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return "\n".join(line for line in text.splitlines() if line.startswith("|"))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is a string alone: a docstring, or the text below a constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@dataclass
class SeedRecord:
    """A schedule that led to something new.

    Attributes:
        schedule: As `short_text` writes it.
        fresh: How many new states it led to.
        done: Acts that were played beside it; they have a fixed order.
    """

    schedule: str
    fresh: int
    done: int = 0


@dataclass
class SettingRecord:
    """How far the search is in one setting.

    Attributes:
        done: Schedules of each list that were played; each list has a fixed order.
        total: Schedules of each list that ends, where it was counted.
        states: `short_hash` of each statement or event in a state of the owner.
        cpu_s: Seconds of CPU.
    """

    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LISTS, 0))
    total: dict[str, int] = field(default_factory=dict)
    seeds: list[SeedRecord] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    cpu_s: float = 0.0

    def keep_seed(self, schedule: Schedule, fresh: int) -> None:
        """Keep a schedule that led to something new, while it is among the `MAX_SEEDS` that led to most."""
        self.seeds.append(SeedRecord(short_text(schedule), fresh))
        self.seeds = sorted(self.seeds, key=lambda seed: -seed.fresh)[:MAX_SEEDS]


@dataclass
class Part:
    """One run of the search.

    Attributes:
        commit: That was played.
        schedules: How many; `pairs` of them have two acts or more.
        traces: Of these, runs that did not go like another one of the same part.
        findings: That were new.
    """

    commit: str
    schedules: int = 0
    pairs: int = 0
    traces: int = 0
    cpu_s: float = 0.0
    findings: int = 0


@dataclass
class Account:
    """What was searched on one protocol, over all parts: it grows over any number of runs, ended or killed.

    Attributes:
        protocol: `digest_sources`: another protocol, or another generator, begins a new account.
        findings: By sign: the fault, the schedule, and the commit.
        earlier: Sums of accounts on other protocols.
    """

    protocol: str
    parts: list[Part] = field(default_factory=list)
    settings: dict[str, SettingRecord] = field(default_factory=dict)
    findings: dict[str, dict[str, str]] = field(default_factory=dict)
    earlier: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, protocol: str) -> Self:
        """Go on with the account in a file; begin one where there is none, or where it is about another protocol."""
        if not path.exists():
            return cls(protocol)
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["format"] != FORMAT:
            raise ValueError(f"{path}: format {body['format']}, expected {FORMAT}")
        if body["protocol"] != protocol:
            return cls(protocol, earlier=[*body["earlier"], {"protocol": body["protocol"], **body["sum"]}])
        settings = {
            name: SettingRecord(
                each["done"],
                each["total"],
                [SeedRecord(*seed) for seed in each["seeds"]],
                set(each["states"].split()),
                each["cpu_s"],
            )
            for name, each in body["settings"].items()
        }
        parts = [Part(**part) for part in body["parts"]]
        return cls(protocol, parts, settings, body["findings"], body["earlier"])

    def join(self, other: "Account") -> None:
        """Take in what another process has played in other settings, since both went on from one account."""
        if other.protocol != self.protocol:
            raise ValueError(f"an account of the protocol {other.protocol}, expected {self.protocol}")
        self.parts += [part for part in other.parts if part not in self.parts]
        for name, record in other.settings.items():
            if name not in self.settings or record.cpu_s > self.settings[name].cpu_s:
                self.settings[name] = record
        self.findings = {**other.findings, **self.findings}

    def sums(self) -> dict[str, Any]:
        """What all parts come to."""
        lists = {name: sum(each.done[name] for each in self.settings.values()) for name in LISTS}
        return {
            "commits": list(dict.fromkeys(part.commit for part in self.parts)),
            "schedules": sum(part.schedules for part in self.parts),
            "pairs": sum(part.pairs for part in self.parts),
            "lists": lists,
            "singles_in_all": sum(each.total.get("singles", 0) for each in self.settings.values()),
            "singles_alike": sum(each.total.get("singles alike", 0) for each in self.settings.values()),
            "states": sum(len(each.states) for each in self.settings.values()),
            "cpu_s": round(sum(part.cpu_s for part in self.parts)),
            "findings": len(self.findings),
        }

    def write(self, path: Path) -> None:
        """Put it in the place of the file at once."""
        settings = {
            name: {
                "done": each.done,
                "total": each.total,
                "cpu_s": round(each.cpu_s, 1),
                "seeds": [[seed.schedule, seed.fresh, seed.done] for seed in each.seeds],
                "states": " ".join(sorted(each.states)),
            }
            for name, each in sorted(self.settings.items())
        }
        parts = [{**vars(part), "cpu_s": round(part.cpu_s, 1)} for part in self.parts]
        body = {
            "format": FORMAT,
            "name": "adversary",
            "command": "python tests/pipeline/adversary --cpu-minutes N",
            "machine": describe_machine(),
            "load": load_average(),
            "commit": self.parts[-1].commit,
            "protocol": self.protocol,
            "sum": self.sums(),
            "parts": parts,
            "findings": self.findings,
            "earlier": self.earlier,
            "settings": settings,
        }
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
