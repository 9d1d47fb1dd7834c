"""The phases from the user's texts to a chat, in order, each by the same code as its own command."""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.config import load_config
from phalanx.data.tokenizers.recipe import TokenizerRecipe, make_tokenizer
from phalanx.laptop.folder import CHATS, hold_folder, read_lines
from phalanx.laptop.phases import (
    PhaseRecord,
    digest_inputs,
    forget_phases,
    list_open_phases,
    read_records,
    write_record,
    write_whole,
)
from phalanx.laptop.plan import PHASES, TRAINED, LaptopPlan, Phase
from phalanx.laptop.questions import ask_about
from phalanx.laptop.scores import count_bits, write_answers
from phalanx.report import write_report
from phalanx.serve import open_text_model
from phalanx.train import PastRun, export_run, holds_run, load_run, train

RESULTS = "results.json"
MODEL_OF: Mapping[Phase, str] = {"pretrain": "models/pretrain", "chat": "models/chat", "preferences": "model"}
_ANSWERS = 3


@dataclass(frozen=True)
class Interrupted:
    """A run of `phalanx train` that did not complete."""

    phase: Phase
    status: str


class LaptopRun:
    """The phases of one folder.

    Args:
        clock: Seconds; for the times that are printed, which decide nothing.
    """

    def __init__(
        self, folder: Path, plan: LaptopPlan, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._console = console
        self._clock = clock
        self._phases: Mapping[Phase, Callable[[], dict[str, Any] | Interrupted]] = {
            "tokenizer": self._make_tokenizer,
            "pretrain": lambda: self._train("pretrain"),
            "chat": lambda: self._train("chat"),
            "preferences": lambda: self._train("preferences"),
            "evaluate": self._evaluate,
            "report": self._report,
        }

    def run_phases(self, redo: Phase | None = None) -> dict[str, Any] | Interrupted:
        """Run all phases that are not done.

        Args:
            redo: Forget this phase, and those behind it, first.

        Returns:
            What ``results.json`` holds.

        Raises:
            ConfigError: Another command runs in the folder, or a run file was changed after its phase was done.
        """
        with contextlib.chdir(self._folder), hold_folder(Path()):
            here = Path()
            if redo is not None:
                forget_phases(here, redo, _remove)
            open_phases = list_open_phases(read_records(here), digest_inputs(here))
            for phase in PHASES:
                if phase not in open_phases:
                    self._say(f"{phase}: done before")
                    continue
                outcome = self._run_phase(phase)
                if isinstance(outcome, Interrupted):
                    return outcome
            # from the records each time: an earlier start may have been killed behind the last one
            results = self._results()
            write_whole(Path(RESULTS), json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            return results

    def _run_phase(self, phase: Phase) -> Interrupted | None:
        estimate_s = self._plan.estimates_s[phase]
        inputs = digest_inputs(Path())[phase]
        begun_mark = Path("done") / f"{phase}.begun"
        is_resumed = begun_mark.exists()
        begun_mark.parent.mkdir(exist_ok=True)
        begun_mark.touch()
        self._say(f"\nphase {PHASES.index(phase) + 1} of {len(PHASES)}: {phase}, about {in_words(estimate_s)}")
        start = self._clock()
        facts = self._phases[phase]()
        if isinstance(facts, Interrupted):
            return facts
        seconds = self._clock() - start
        record = PhaseRecord(phase=phase, inputs=inputs, seconds=seconds, is_resumed=is_resumed, facts=facts)
        write_record(Path(), record)
        begun_mark.unlink()
        note = ", behind an interrupted start" if is_resumed else ""
        self._say(f"{phase}: done in {in_words(seconds)} (planned {in_words(estimate_s)}){note}")
        return None

    def _make_tokenizer(self) -> dict[str, Any]:
        _remove(Path("tokenizer"))
        record = make_tokenizer(load_config(Path("tokenizer.toml"), TokenizerRecipe, ()), Path("tokenizer"))
        return {"vocab_size": record["vocab_size"], "digest": record["vocabulary_digest"]}

    def _train(self, phase: Phase) -> dict[str, Any] | Interrupted:
        run_dir, out = Path("runs") / phase, Path(MODEL_OF[phase])
        run = load_run(Path(f"{phase}.toml"))
        summary = train(run, run_dir, resume=holds_run(run_dir), console=self._console)
        if summary["status"] != "completed":
            return Interrupted(phase, summary["status"])
        # what is there has no record: an earlier start was killed behind its export
        _remove(out)
        export_run(PastRun(run_dir), out, best=run.checkpoint.best is not None)
        return pick_facts(phase, summary)

    def _evaluate(self) -> dict[str, Any]:
        texts = [row["text"] for row in read_lines(Path("texts/held_out.jsonl"))]
        scores: dict[str, Any] = {}
        for phase in TRAINED:
            model = open_text_model(Path(MODEL_OF[phase]))
            bits, perplexity = count_bits(model, texts)
            scores[phase] = {"bits_per_byte": bits, "perplexity": perplexity}
        return {"scores": scores, "answers": write_answers(model, self._questions(texts))}

    def _questions(self, texts: list[str]) -> list[str]:
        """Return a greeting, a question that was learned, and one about a text that was not."""
        asked = ["Hello!"]
        if Path(CHATS).is_file():
            asked.append(read_lines(Path(CHATS))[-1]["messages"][-2]["content"])
        asked += [question for text in texts for question, _ in ask_about(text)]
        return asked[:_ANSWERS]

    def _report(self) -> dict[str, Any]:
        return {"reports": [str(write_report(Path("runs") / phase)) for phase in TRAINED]}

    def _results(self) -> dict[str, Any]:
        records, estimates = read_records(Path()), self._plan.estimates_s
        plan = self._plan
        return {
            "parameters": plan.num_parameters,
            "vocab_size": plan.vocab_size,
            "minutes": plan.question.minutes,
            "phases": [
                {
                    "phase": phase,
                    "planned_s": round(estimates[phase], 2),
                    "real_s": round(records[phase].seconds, 2),
                    "interrupted": records[phase].is_resumed,
                }
                for phase in PHASES
            ],
            "scores": score_rows({phase: records[phase].facts for phase in PHASES}),
            "answers": records["evaluate"].facts["answers"],
            "reports": records["report"].facts["reports"],
            "final_weights_digest": records["preferences"].facts["final_weights_digest"],
        }

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def pick_facts(phase: Phase, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run's summary that the table at the end shows."""
    facts = {name: summary[name] for name in ("final_weights_digest", "steps", "tokens", "tokens_per_s")}
    if phase == "pretrain":
        held_out = summary["validation_sets"]["held_out"]
        return {**facts, "before": held_out["perplexity_first"], "after": held_out["perplexity"]}
    if phase == "chat":
        return {**facts, "before": summary["validation_perplexity_first"], "after": summary["validation_perplexity"]}
    pairs = summary["preferences"]
    return {**facts, **{name: pairs[name] for name in ("accuracy_first", "accuracy", "margin_first", "margin")}}


def score_rows(facts: Mapping[Phase, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each figure, with its value before and after the phase.

    Bits for each byte of the untrained model are its perplexity's, by the tokens that a byte has.
    """
    scores = facts["evaluate"]["scores"]
    trained = scores["pretrain"]
    untrained = trained["bits_per_byte"] * math.log(facts["pretrain"]["before"]) / math.log(trained["perplexity"])
    bits = [untrained, *(scores[phase]["bits_per_byte"] for phase in TRAINED)]
    perplexities = [facts["pretrain"]["before"], *(scores[phase]["perplexity"] for phase in TRAINED)]
    rows = []
    for number, phase in enumerate(TRAINED):
        rows.append(_row(phase, "bits/byte, held-out text", bits[number], bits[number + 1]))
        rows.append(_row(phase, "perplexity, held-out text", perplexities[number], perplexities[number + 1]))
    rows.insert(4, _row("chat", "perplexity, held-out answers", facts["chat"]["before"], facts["chat"]["after"]))
    pairs = facts["preferences"]
    rows.append(_row("preferences", "accuracy, held-out pairs", pairs["accuracy_first"], pairs["accuracy"]))
    rows.append(_row("preferences", "margin, held-out pairs", pairs["margin_first"], pairs["margin"]))
    return rows


def in_words(seconds: float) -> str:
    """Return a time as minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _row(phase: str, figure: str, before: float | None, after: float | None) -> dict[str, Any]:
    return {"phase": phase, "figure": figure, "before": before, "after": after}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
