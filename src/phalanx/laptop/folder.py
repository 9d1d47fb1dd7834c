"""The folder of a laptop run: texts, run files and plan appear at once; what phases make comes beside them."""

import contextlib
import fcntl
import importlib.resources
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from phalanx.config import dump_toml, load_config
from phalanx.data.publish import publish_directory
from phalanx.errors import ConfigError
from phalanx.laptop.phases import dump_lines
from phalanx.laptop.plan import LaptopPlan, LaptopRequest, Phase, TrainingSteps
from phalanx.laptop.questions import make_chats, make_preferences
from phalanx.laptop.texts import CutTexts
from phalanx.laptop.vocabulary import MARKS

PLAN_FILE = "plan.toml"
CHATS, PREFERENCES = "texts/chats.jsonl", "texts/preferences.jsonl"
_LR_SHARES: Mapping[Phase, float] = {"pretrain": 1.0, "chat": 1 / 3, "preferences": 1 / 20}


@dataclass(frozen=True)
class MadeRows:
    """Chats and preferences that are made of the texts; empty where the user gave a file."""

    chats: Sequence[dict[str, Any]]
    preferences: Sequence[dict[str, Any]]


def make_rows(question: LaptopRequest, texts: CutTexts) -> MadeRows:
    """Make missing chats and preferences out of the training documents."""
    needs_chats, needs_pairs = question.data_sft is None, question.data_preferences is None
    chats = make_chats(texts.train) if needs_chats or needs_pairs else []
    return MadeRows(chats if needs_chats else [], make_preferences(chats) if needs_pairs else [])


def open_plan(folder: Path, question: LaptopRequest) -> LaptopPlan | None:
    """Return the plan of an earlier start of the same command; None where the folder is new.

    Raises:
        ConfigError: The folder holds something else, or the command asks for something else than before.
    """
    if not (folder / PLAN_FILE).is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder}: is there and holds no {PLAN_FILE}; choose a new folder with --out"
            ).with_facts(key="--out", file=str(folder), do="choose a new folder with --out")
        return None
    plan = load_config(folder / PLAN_FILE, LaptopPlan, ())
    before, now = plan.question.model_dump(), question.model_dump()
    different = [name for name in before if before[name] != now[name]]
    if different:
        if different == ["texts"]:
            raise ConfigError(
                f"{folder}: was begun with other texts; put them back, or choose a new folder with --out"
            ).with_facts(key="--out", file=str(folder), do="choose a new folder with --out")
        shown = ", ".join(f"{name.replace('_', '-')} {before[name]} (now {now[name]})" for name in different)
        raise ConfigError(f"{folder}: was begun with {shown}; repeat that command, or choose a new folder with --out")
    return plan


def make_folder(folder: Path, plan: LaptopPlan, texts: CutTexts, rows: MadeRows) -> None:
    """Write texts, run files, README and plan to a folder that appears whole.

    Raises:
        DataError: It cannot be written.
    """

    def fill(directory: Path) -> None:
        (directory / "texts").mkdir()
        for name, part in (("train", texts.train), ("held_out", texts.held_out)):
            _write(directory / f"texts/{name}.jsonl", dump_lines([{"text": text} for text in part]))
        if rows.chats:
            _write(directory / CHATS, dump_lines(rows.chats))
        if rows.preferences:
            _write(directory / PREFERENCES, dump_lines(rows.preferences))
        for name, text in run_files(plan).items():
            _write(directory / name, text)
        _write(directory / "README.md", _read_template("README.md").substitute(_values(plan)))
        _write(directory / PLAN_FILE, dump_toml(plan))

    publish_directory(folder, fill)


def run_files(plan: LaptopPlan) -> dict[str, str]:
    """Return the run file of each phase that trains, and the recipe of the vocabulary, by name."""
    phases: dict[Phase, TrainingSteps] = {"pretrain": plan.pretrain, "chat": plan.chat, "preferences": plan.preferences}
    files = {"tokenizer.toml": _read_template("tokenizer.toml").substitute(_values(plan))}
    for phase, steps in phases.items():
        lengths = {"steps": steps.steps, "batch": steps.batch, "microbatches": steps.microbatches}
        lengths["held_rows"] = steps.held_rows
        if steps.max_documents is not None:
            lengths["max_documents"] = steps.max_documents
        every = {"often": steps.often, "every": steps.often, "lr": f"{plan.shape.lr * _LR_SHARES[phase]:.1e}"}
        files[f"{phase}.toml"] = _read_template(f"{phase}.toml").substitute({**_values(plan), **lengths, **every})
    return files


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keep a second command out of the folder."""
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigError(f"{folder}: another phalanx laptop runs there; wait for its end").with_facts(
                file=str(folder)
            ) from exc
        yield


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that `make_folder` wrote."""
    return [json.loads(row) for row in path.read_bytes().splitlines()]


def _values(plan: LaptopPlan) -> dict[str, str | int]:
    shape = plan.shape
    question = plan.question
    return {
        "vocab_size": plan.vocab_size,
        "hidden": shape.hidden,
        "inner": shape.inner,
        "layers": shape.layers,
        "heads": shape.heads,
        "tokens": shape.tokens,
        "threads": plan.threads,
        "seed": question.seed,
        "marks": json.dumps(MARKS),
        "parameters": f"{plan.num_parameters:,}",
        "minutes": f"{question.minutes:g}",
        "chats": json.dumps(question.data_sft or CHATS, ensure_ascii=False),
        "preferences": json.dumps(question.data_preferences or PREFERENCES, ensure_ascii=False),
    }


def _read_template(name: str) -> Template:
    file = importlib.resources.files("phalanx.laptop").joinpath("run_files", name)
    return Template(file.read_text(encoding="utf-8"))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
