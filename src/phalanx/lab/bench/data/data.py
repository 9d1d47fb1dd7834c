"""``phalanx bench data``: the rules of a build beside datatrove's filters, on the same real documents."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from phalanx.data.rules import RULES, DecontaminationConfig, EvaluationSetConfig, RuleSettings
from phalanx.data.sources import Document
from phalanx.data.tasks.task import find_file
from phalanx.errors import DataError
from phalanx.lab.bench.data.documents import real_documents
from phalanx.lab.bench.data.order import measure_order
from phalanx.lab.bench.data.own_rules import RuleArm, Verdict, make_arms
from phalanx.lab.bench.data.peer import PEER_VARIABLE, FilterPeer, peer_python
from phalanx.lab.bench.data.planted import plant_copies
from phalanx.lab.bench.data.whole_build import measure_build
from phalanx.lab.bench.measure.machine import load_average, result_context
from phalanx.lab.bench.measure.plain import training_rate
from phalanx.lab.bench.measure.shard_reading import ReadingPlan, measure_reading

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
