"""Our rules under a clock: each alone, and all of them on one page."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from phalanx.data.rules import RULES, Drop, Edit, Outcome, Page, Rule, RuleSettings, make_rule
from phalanx.data.rules.term_table import TermTable, replace_table
from phalanx.data.sources import Document

Verdict = str | list[str] | None
"""Of a text that stays, of one that is dropped, of one with another text: as the peer says it."""


class BenchTexts:
    """Documents by number, as a corpus rule asks for them."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._pages = [Page(document, "bench") for document in documents]

    def __len__(self) -> int:
        return len(self._pages)

    def read_page(self, number: int) -> Page:
        """One document."""
        return self._pages[number]


@dataclass
class RuleArm:
    """Rules that run one after the other on the same pages, with their processor time.

    Attributes:
        cpu_s: CPU seconds of each rule; shared work counts for the first rule that asks for it.
        verdicts: Verdicts of each document rule, one per document.
        marks: Marks of each corpus rule, one per document.
    """

    rules: dict[str, Rule]
    cpu_s: dict[str, float] = field(default_factory=dict)
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)
    marks: dict[str, list[bytes]] = field(default_factory=dict)
    judged: list[Document] = field(default_factory=list)
    table: TermTable = field(default_factory=TermTable)

    def __post_init__(self) -> None:
        for name, rule in self.rules.items():
            self.cpu_s[name] = 0.0
            (self.verdicts if hasattr(rule, "judge_page") else self.marks)[name] = []

    def judge_documents(self, documents: Sequence[Document]) -> None:
        """Judge and mark; edits are followed, and nothing is left out after a drop: every rule sees every document."""
        # every arm finds out by itself what is known of a term
        others = replace_table(self.table)
        for document in documents:
            page = Page(document, "bench")
            for name, rule in self.rules.items():
                page = self._judge_document(name, rule, page)
            self.judged.append(page.document)
        self.table = replace_table(others)

    def _judge_document(self, name: str, rule: Rule, page: Page) -> Page:
        begun = time.process_time()
        if not hasattr(rule, "judge_page"):
            mark = rule.mark_page(page)
            self.cpu_s[name] += time.process_time() - begun
            self.marks[name].append(mark)
            return page
        outcome = rule.judge_page(page)
        edited = Page(replace(page.document, text=outcome.text), "bench") if isinstance(outcome, Edit) else page
        self.cpu_s[name] += time.process_time() - begun
        self.verdicts[name].append(_verdict_of(outcome))
        return edited

    def decide_corpus_rules(self) -> None:
        """Let corpus rules decide over all documents."""
        corpus = BenchTexts(self.judged)
        for name, marks in self.marks.items():
            others = replace_table(self.table)
            begun = time.process_time()
            rule = self.rules[name]
            outcomes = dict(rule.decide_outcomes(iter(marks), corpus)) if not hasattr(rule, "judge_page") else {}
            self.cpu_s[name] += time.process_time() - begun
            self.verdicts[name] = [_verdict_of(outcomes.get(number)) for number in range(len(marks))]
            self.table = replace_table(others)


def _verdict_of(outcome: Outcome) -> Verdict:
    if isinstance(outcome, Drop):
        return outcome.reason.measure
    if isinstance(outcome, Edit):
        return [hashlib.sha256(outcome.text.encode("utf-8", "replace")).hexdigest()]
    return None


def make_arms(chain: Sequence[RuleSettings], peer_chain: Sequence[str]) -> dict[str, RuleArm]:
    """Return one arm per rule, one of all rules, and one of the rules that the peer has as well."""
    make: Callable[[RuleSettings], Rule] = make_rule
    arms = {config.kind: RuleArm({config.kind: make(config)}) for config in chain}
    arms["chain"] = RuleArm({config.kind: make(config) for config in chain})
    arms["chain_of_both"] = RuleArm({name: make(RULES[name].config(kind=name)) for name in peer_chain})
    return arms
