"""``phalanx bench data``: the rules of a build beside datatrove's filters, on the same real documents."""

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data import BatchLoader, Corpus, SequenceLayout
from phalanx.data.build.recipe import DataRecipe
from phalanx.data.build.run import BuildOptions, build_recipe
from phalanx.data.corpus import CorpusFacts, TokenGroup
from phalanx.data.packing import TokenSplit
from phalanx.data.rules import RULES, DecontaminationConfig, EvaluationSetConfig, RuleSettings
from phalanx.data.sources import Document
from phalanx.data.tasks.task import find_file
from phalanx.errors import DataError
from phalanx.lab.bench.data.documents import debian_pages, real_documents
from phalanx.lab.bench.data.own_rules import RuleArm, Verdict, make_arms
from phalanx.lab.bench.data.peer import PEER_VARIABLE, FilterPeer, PeerProgram, peer_python
from phalanx.lab.bench.data.planted import plant_copies
from phalanx.lab.bench.measure.machine import load_average, result_context
from phalanx.lab.bench.measure.plain import training_rate
from phalanx.lab.bench.measure.shard_reading import ReadingPlan, measure_reading

ROWS = 1000
SCENES: tuple[dict[str, int], ...] = (
    {"rows": ROWS, "before": 1, "after": 1, "steps": 100, "batch": 4},
    {"rows": ROWS, "before": 2, "after": 2, "steps": 50, "batch": 4},
    {"rows": ROWS, "before": 2, "after": 3, "steps": 50, "batch": 4},
    {"rows": ROWS, "before": 3, "after": 1, "steps": 30, "batch": 4},
)
"""Ranks before and after the stop, steps until it, rows of a rank's step; then the epoch is read to its end."""


def measure_order(python: str | None) -> dict[str, Any]:
    """Play each scene with our loader, and with the peers' where there are any.

    Returns:
        Samples lost and repeated over all scenes and by scene; of each peer, under ``peers``, the same. A scene that a
        peer refuses has null.
    """
    scenes = [_play_scene(scene) for scene in SCENES]
    peers = {} if python is None else _peer_scenes(python)
    return {
        "rows": ROWS,
        "scenes": [dict(scene) for scene in SCENES],
        **_sum_scenes(scenes),
        "peers": {name: _sum_scenes(results) for name, results in peers.items()},
    }


def _sum_scenes(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum what scenes came to; a scene that was refused counts for nothing and is told."""
    return {
        "lost": sum(scene["lost"] or 0 for scene in found),
        "repeated": sum(scene["repeated"] or 0 for scene in found),
        "refused": sum(scene["refused"] is not None for scene in found),
        "by_scene": found,
    }


def _play_scene(scene: dict[str, int]) -> dict[str, Any]:
    """Stop a loader, write its state as JSON, and go on with another world."""
    corpus, seen = _scene_corpus(scene["rows"]), Counter[int]()
    loader = BatchLoader(corpus, scene["before"] * scene["batch"], seed=7)
    for _ in range(scene["steps"]):
        seen.update(loader.next_batch().indices)
    state = json.loads(json.dumps(loader.position_state()))
    loader = BatchLoader(corpus, scene["after"] * scene["batch"], seed=7)
    loader.load_position(state)
    # an epoch goes over into the next one, which is not counted
    num_remaining = scene["rows"] - seen.total()
    while num_remaining:
        taken = loader.next_batch().indices[:num_remaining]
        seen.update(taken)
        num_remaining -= len(taken)
    return {
        "lost": sum(row not in seen for row in range(scene["rows"])),
        "repeated": seen.total() - len(seen),
        "refused": None,
    }


def _scene_corpus(rows: int) -> Corpus:
    tokens = np.arange(1, 2 * rows + 2, dtype=np.uint32)
    split = TokenSplit(tokens, 0, lambda: np.array([0, len(tokens)]), lambda _: np.zeros(1))
    facts = CorpusFacts("0" * 64, len(tokens) + 1, 0, Path("tokenizer.json"))
    return Corpus(facts, [TokenGroup("", "0" * 64, split, split)], SequenceLayout(2))


def _peer_scenes(python: str) -> dict[str, list[dict[str, Any]]]:
    with PeerProgram(python, "peer_order.py", "datasets and torchdata") as peer:
        results: dict[str, list[dict[str, Any]]] = peer.ask(SCENES)
    return results


STEPS = (
    "unicode",
    "mojibake",
    "length",
    "language_mixing",
    "gopher_repetition",
    "gopher_quality",
    "c4",
    "fineweb",
    "pii",
    "secrets",
    "hidden_characters",
    "homoglyphs",
    "instructions_in_text",
    "exact_duplicates",
    "near_duplicates",
    "paragraph_duplicates",
    "repeated_substrings",
    "bursts",
    "surprisal",
)
"""All that need no list, evaluation set or recorded hash of a user's own, and are not for labelled texts."""


class PhaseClock:
    """A progress bar that keeps the processor time of each phase instead of showing it."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self._phase, self._begun = "list", time.process_time()

    def begin_phase(self, phase: str, pieces: int, size_bytes: int) -> None:
        """End a phase, and begin the next one."""
        del pieces, size_bytes
        now = time.process_time()
        self.cpu_s[self._phase] = now - self._begun
        self._phase, self._begun = phase, now

    def finish_piece(self, size_bytes: int, left_out: dict[str, int]) -> None:
        """Pass over it."""


def measure_build(size_bytes: int, vocab_size: int = 4096, steps: Sequence[str] = STEPS) -> dict[str, Any] | None:
    """Build a dataset out of pages with so many bytes of text; None where there are not so many.

    Returns:
        `raw_mb` and `text_mb` that were read, `kept_mb` of text, `documents`, `tokens`, `cpu_s` with everything from
        the listing of files to the signature, by phase in `phases`, and megabytes of text and of raw bytes by it.
    """
    pages = debian_pages(size_bytes)
    if pages is None:
        return None
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        for page in pages:
            copy = home / "pages" / page.relative_to("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, copy)
        recipe = DataRecipe.model_validate(
            {
                "sources": ({"kind": "html", "path": home / "pages", "name": "pages"},),
                "steps": tuple({"kind": kind} for kind in steps),
                "tokenizer": {"kind": "bpe", "vocab_size": vocab_size},
                "output": {"signer": home / "key"},
            }
        )
        clock, begun = PhaseClock(), time.process_time()
        outcome = build_recipe(recipe, home / "dataset", BuildOptions(progress=clock))
        clock.begin_phase("end", 0, 0)
        cpu_s = time.process_time() - begun
    source = outcome.report["sources"][0]
    text_mb, raw_mb = (source["read"][size] / 1e6 for size in ("text_bytes", "raw_bytes"))
    return {
        "steps": list(steps),
        "documents": source["read"]["documents"],
        "tokens": sum(group["tokens"] for group in outcome.report["groups"]),
        "raw_mb": raw_mb,
        "text_mb": text_mb,
        "kept_mb": source["kept"]["text_bytes"] / 1e6,
        "cpu_s": cpu_s,
        "phases": clock.cpu_s,
        "text_mb_per_s_core": text_mb / cpu_s,
        "raw_mb_per_s_core": raw_mb / cpu_s,
    }


_MB = 1_000_000
_TURN_BYTES = _MB
_CHAIN_EVERY = 4
CHAIN = (
    "unicode",
    "mojibake",
    "length",
    "language",
    "language_mixing",
    "gopher_repetition",
    "gopher_quality",
    "c4",
    "fineweb",
    "exact_duplicates",
    "near_duplicates",
    "paragraph_duplicates",
    "repeated_substrings",
)
"""In the order of a recipe; `decontamination` comes before the duplicates where an evaluation set is here."""
OF_BOTH = ("gopher_repetition", "gopher_quality", "c4", "fineweb", "near_duplicates")
"""What the peer has as well; of near duplicates the signature."""


def bench_data(quick: bool) -> dict[str, Any]:
    """Measure every rule alone and in a chain, in turns with the peer, by CPU time."""
    documents, kinds = real_documents(2 * _MB if quick else 20 * _MB)
    plan = ReadingPlan(tokens=2**20, leaf_bytes=(2**16,), epochs=2) if quick else ReadingPlan()
    return measure_rules(documents, peer_python(), planted=100 if quick else 400) | {
        "bytes": kinds,
        "quick": quick,
        "whole_build": measure_build(_MB if quick else 20 * _MB),
        "order": measure_order(peer_python()),
        "reading": measure_reading(plan),
        "training_tokens_per_cpu_s": training_rate(2 if quick else 4),
    }


def measure_rules(documents: Sequence[Document], python: str | None, planted: int) -> dict[str, Any]:
    """Run all arms over the documents, turn by turn.

    Args:
        python: Python of the peer's environment; None leaves its figures null.
        planted: Near duplicates to plant and look for.
    """
    load = load_average()
    arms = make_arms(_rule_chain(), OF_BOTH)
    turns = _cut_turns(documents)
    theirs = PeerFigures()
    with ExitStack() as stack:
        peer = stack.enter_context(FilterPeer(python)) if python else None
        for number, turn in enumerate(turns):
            if peer and number % 2:
                theirs.ask_peer(peer, turn, chain=False)
            for arm in arms.values():
                arm.judge_documents(turn)
            if peer and not number % 2:
                theirs.ask_peer(peer, turn, chain=number % _CHAIN_EVERY == 0)
    for arm in arms.values():
        arm.decide_corpus_rules()
    rows = [
        _rule_row(name, arm, arms["chain"], _size_megabytes(documents)) | theirs.columns_of_rule(name)
        for name, arm in arms.items()
    ]
    for row in rows:
        row["agreement"] = theirs.agreement_share(row["rule"], arms[row["rule"]])
    return {
        "name": "data",
        "command": f"{PEER_VARIABLE}=PYTHON phalanx bench data --json",
        **result_context([load, load_average()]),
        "documents": len(documents),
        "turns": len(turns),
        "rows": rows,
        "disagreements": _list_disagreements(documents, arms, theirs.verdicts),
        "near_duplicates": plant_copies(documents, planted),
    }


def _rule_chain() -> list[RuleSettings]:
    configs = [RULES[name].config(kind=name) for name in CHAIN]
    try:
        path = find_file(None, "wikitext2_test.txt.gz", "it comes with the data files of the tasks")
    except DataError:
        return configs
    tested = DecontaminationConfig(sets=(EvaluationSetConfig(name="wikitext2_test", path=path),))
    return [*configs[: CHAIN.index("exact_duplicates")], tested, *configs[CHAIN.index("exact_duplicates") :]]


def _cut_turns(documents: Sequence[Document]) -> list[list[Document]]:
    turns: list[list[Document]] = [[]]
    size = 0
    for document in documents:
        turns[-1].append(document)
        size += len(document.text)
        if size >= _TURN_BYTES:
            turns.append([])
            size = 0
    return [turn for turn in turns if turn]


def _size_megabytes(documents: Sequence[Document]) -> float:
    return sum(len(document.text.encode("utf-8", "replace")) for document in documents) / _MB


def _rule_row(name: str, arm: RuleArm, chain: RuleArm, size: float) -> dict[str, Any]:
    verdicts = arm.verdicts.get(name, [])
    return {
        "rule": name,
        "mb_per_s_core": size / sum(arm.cpu_s.values()),
        "chain_share": chain.cpu_s[name] / sum(chain.cpu_s.values()) if name in chain.cpu_s else None,
        "dropped": sum(isinstance(verdict, str) for verdict in verdicts) if verdicts else None,
        "edited": sum(isinstance(verdict, list) for verdict in verdicts) if verdicts else None,
    }


class PeerFigures:
    """What the peer took and said, of all turns so far; its chain runs in every fourth turn only, as it is slow."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.verdicts: dict[str, list[Verdict]] = {}
        self._seconds: dict[str, float] = {}
        self._megabytes: dict[str, float] = {}

    def ask_peer(self, peer: FilterPeer, turn: list[Document], *, chain: bool) -> None:
        """Let the peer judge one turn."""
        self.name = peer.name
        for name, verdicts_of_rule in peer.judge_texts([document.text for document in turn], chain=chain).items():
            self._seconds[name] = self._seconds.get(name, 0.0) + verdicts_of_rule["cpu_s"]
            self._megabytes[name] = self._megabytes.get(name, 0.0) + _size_megabytes(turn)
            if "verdicts" in verdicts_of_rule:
                self.verdicts.setdefault(name, []).extend(verdicts_of_rule["verdicts"])

    def columns_of_rule(self, rule: str) -> dict[str, Any]:
        """The keys of a row: the name of the peer, its speed, and the megabytes that it was measured on."""
        name = "chain" if rule == "chain_of_both" else rule
        is_measured = name in self._seconds
        return {
            "peer": self.name if is_measured else None,
            "peer_mb_per_s_core": self._megabytes[name] / self._seconds[name] if is_measured else None,
            "peer_mb": self._megabytes.get(name),
        }

    def agreement_share(self, rule: str, arm: RuleArm) -> float | None:
        """The share of documents that both judge alike."""
        theirs = self.verdicts.get(rule)
        return sum(map(_verdicts_agree, arm.verdicts[rule], theirs)) / len(theirs) if theirs else None


def _verdicts_agree(ours: Verdict, theirs: Verdict) -> bool:
    """Both drop it, whatever for; or both keep it with the same text."""
    return (isinstance(ours, str) and isinstance(theirs, str)) or ours == theirs


def _list_disagreements(
    documents: Sequence[Document], arms: dict[str, RuleArm], peer: dict[str, list[Verdict]]
) -> list[dict[str, Any]]:
    """Every document that the two judge differently."""
    return [
        {"rule": name, "document": document.name, "ours": ours, "theirs": theirs}
        for name, verdicts in peer.items()
        for document, ours, theirs in zip(documents, arms[name].verdicts[name], verdicts, strict=True)
        if not _verdicts_agree(ours, theirs)
    ]
