"""One piece of work of one pass: its documents meet the steps, and what becomes of each is written down."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.config import canonical_json
from phalanx.data.build.passes import BuildPass, as_corpus_rule, as_document_rule
from phalanx.data.build.recipe import DataRecipe
from phalanx.data.build.records import RecordWriter, encode_document, encode_json_line
from phalanx.data.build.tally import ByteTally, Fate
from phalanx.data.normal_form import to_nfc
from phalanx.data.rules import Drop, Edit, Outcome, Page, Quarantine, Rule, RuleReason
from phalanx.data.rules import Tag as TagOutcome
from phalanx.data.sources import BrokenRecord, Document, Origin
from phalanx.errors import DataError

DOCUMENTS, MARKS, ACCOUNT = "documents", "marks", "account"
"""Files of a finished piece: its kept documents, their marks, and a line for each document that was left out."""
Record = Document | BrokenRecord
_LONGEST = 1000
_MAX_ENTRY_BYTES = 48 * 1024
"""Of name and fields; shards take 64 KiB, and steps may add tags."""


class PieceWriter:
    """What one piece leaves behind: documents, marks and lines of the account, in three files of one directory."""

    def __init__(self, directory: Path, source: str, excerpt: int) -> None:
        self.tally = ByteTally()
        self._source, self._excerpt = source, excerpt
        self._stack = ExitStack()
        self._documents, self._marks, self._account = (
            self._stack.enter_context(RecordWriter(directory / name)) for name in (DOCUMENTS, MARKS, ACCOUNT)
        )

    def keep_document(self, document: Document, mark: bytes | None) -> None:
        """Let a document go on."""
        self._documents.append_record(encode_document(document))
        if mark is not None:
            self._marks.append_record(mark)

    def leave_out(self, document: Document, fate: Fate, step: str, reason: RuleReason) -> None:
        """Count a document that a step left out, and write its line of the account."""
        content = document.text.encode()
        raw_bytes = 0 if document.origin is None else document.origin.raw_bytes
        self.tally.count_document(fate, step, raw_bytes=raw_bytes, text_bytes=len(content))
        entry = {
            "document": document.name,
            "fate": fate,
            "step": step,
            "measure": reason.measure[:_LONGEST],
            "value": _json_value(reason.value),
            "limit": _json_value(reason.limit),
            "raw_bytes": raw_bytes,
            "text_bytes": len(content),
            "digest": hashlib.sha256(content).hexdigest(),
            "url": None if document.origin is None else document.origin.url,
            "excerpt": document.text[: self._excerpt],
        }
        self._account.append_record(encode_json_line({"source": self._source, **entry}))

    def pass_over(self, record: BrokenRecord) -> None:
        """Count a record that has no text."""
        step = "unsupported" if record.is_unsupported else "damaged"
        self.tally.count_document("broken", step, raw_bytes=record.raw_bytes)
        entry = {"document": record.name, "fate": "broken", "step": step, "measure": record.reason[:_LONGEST]}
        sizes = {"raw_bytes": record.raw_bytes, "text_bytes": 0}
        self._account.append_record(
            encode_json_line({"source": self._source, **entry, "value": "", "limit": "", **sizes})
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # without an error this finishes the files; after one they stay cut, and nothing reads them
        self._stack.__exit__(kind, value, trace)


def _json_value(value: float | int | str) -> float | int | str:
    """JSON has no word for a number that is not finite."""
    if isinstance(value, str):
        return value[:_LONGEST]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class PassFilter:
    """The steps of one pass for the documents of one source."""

    recipe: DataRecipe
    rules: list[Rule]
    build_pass: BuildPass
    source: str

    def filter_documents(
        self, documents: Iterable[Record], decided: Iterator[tuple[int, Outcome]], out: PieceWriter
    ) -> None:
        """Take all documents of a piece through the pass.

        Args:
            decided: Decisions of the corpus rule before this pass, by document numbers in the piece, rising.
        """
        waiting = next(decided, None)
        for number, document in enumerate(documents):
            if isinstance(document, BrokenRecord):
                out.pass_over(document)
                continue
            outcome: Outcome = None
            if waiting is not None and waiting[0] == number:
                outcome, waiting = waiting[1], next(decided, None)
            self._filter_document(document, outcome, out)
        if waiting is not None:
            raise DataError(
                f"step {self._step_name(self.build_pass.decided_step)!r} decided on document {waiting[0]} of a piece "
                "with fewer documents, or twice on one: this is a fault of the rule"
            )

    def _filter_document(self, document: Document, decided: Outcome, out: PieceWriter) -> None:
        page: Page | None = Page(document, self.source)
        if self.build_pass.decided_step is not None:
            page = self._apply_outcome(page, decided, self.build_pass.decided_step, out)
        for place in self.build_pass.steps:
            if page is None:
                return
            page = self._apply_outcome(page, as_document_rule(self.rules[place]).judge_page(page), place, out)
        if page is None:
            return
        if self.build_pass.marked_step is not None:
            out.keep_document(page.document, as_corpus_rule(self.rules[self.build_pass.marked_step]).mark_page(page))
        elif page.text.strip():
            out.keep_document(self._normalize_page(page, out).document, None)
        else:
            out.leave_out(page.document, "dropped", "empty", RuleReason("characters", 0, 1))

    def _normalize_page(self, page: Page, out: PieceWriter) -> Page:
        """Return the page with a text in NFC: equal texts have one digest, one split and the same tokens."""
        text = to_nfc(page.text)
        return (
            page if text == page.text else self._edit_page(page, Edit(text, 1, RuleReason("form", "NFC")), "nfc", out)
        )

    def _apply_outcome(self, page: Page | None, outcome: Outcome, place: int, out: PieceWriter) -> Page | None:
        """Return the page as it goes on; None where the document is left out."""
        if page is None or outcome is None:
            return page
        step = self._step_name(place)
        if isinstance(outcome, Drop):
            out.leave_out(page.document, "dropped", step, outcome.reason)
            return None
        if isinstance(outcome, Quarantine):
            return self._quarantine_page(page, outcome, step, out)
        if isinstance(outcome, Edit):
            return self._edit_page(page, outcome, step, out)
        out.tally.count_document("tagged", step)
        # the text is the same, so what the page has computed of it still holds
        page.document = replace(page.document, fields={**page.fields, **outcome.fields})
        return page

    def _edit_page(self, page: Page, edit: Edit, step: str, out: PieceWriter) -> Page:
        net_bytes = _utf8_size(edit.text, page, step) - _utf8_size(page.text, page, step)
        out.tally.count_document("edited", step, places=edit.places, net_bytes=net_bytes)
        return Page(replace(page.document, text=edit.text), self.source)

    def _quarantine_page(self, page: Page, outcome: Quarantine, step: str, out: PieceWriter) -> Page | None:
        decided = self.recipe.quarantine
        if page.document.name in decided.release:
            out.tally.count_document("released", step)
            return page
        fate: Fate = "dropped" if page.document.name in decided.drop else "quarantined"
        out.leave_out(page.document, fate, step, outcome.reason)
        return None

    def _step_name(self, place: int | None) -> str:
        return "" if place is None else self.recipe.step_names[place]


def _utf8_size(text: str, page: Page, step: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as exc:
        raise DataError(
            f"step {step!r} made a lone surrogate of {page.document.name}; this is a fault of the rule"
        ) from exc


def count_records(records: Iterable[Record], tally: ByteTally) -> Iterator[Record]:
    """Count a source's records, and give each document the size and digest of its bytes where the source does not."""
    for record in records:
        if isinstance(record, BrokenRecord):
            yield record
            continue
        try:
            content = record.text.encode()
        except UnicodeEncodeError as exc:
            size = len(record.text.encode(errors="surrogatepass"))
            raw_bytes = size if record.origin is None else record.origin.raw_bytes
            yield BrokenRecord(record.name, raw_bytes, f"character {exc.start} is a lone surrogate, which is not text")
            continue
        document, raw_bytes = record, len(content) if record.origin is None else record.origin.raw_bytes
        if (trouble := _unstorable_reason(record)) is not None:
            yield BrokenRecord(record.name[:_LONGEST], raw_bytes, trouble)
            continue
        if record.origin is None:
            document = replace(record, origin=Origin(len(content), hashlib.sha256(content).hexdigest()))
        tally.count_document("read", "read", raw_bytes=raw_bytes, text_bytes=len(content))
        yield document


def _unstorable_reason(document: Document) -> str | None:
    """Say why name and fields of a document could not be kept beside its tokens; None where they can."""
    try:
        size = len(canonical_json([document.name, dict(document.fields)]))
    except (ValueError, TypeError) as exc:
        return f"name or fields are no JSON: {exc}"
    if size > _MAX_ENTRY_BYTES:
        return f"name and fields have {size} bytes, at most {_MAX_ENTRY_BYTES} are kept; leave out fields"
    return None


def outcome_to_json(outcome: Outcome) -> list[Any]:
    """Return an outcome as plain data."""
    if isinstance(outcome, Drop | Quarantine):
        reason = outcome.reason
        return [type(outcome).__name__, reason.measure, _json_value(reason.value), _json_value(reason.limit)]
    if isinstance(outcome, Edit):
        reason = outcome.reason
        return [
            "Edit",
            reason.measure,
            _json_value(reason.value),
            _json_value(reason.limit),
            outcome.text,
            outcome.places,
        ]
    return ["None"] if outcome is None else ["Tag", dict(outcome.fields)]


def outcome_from_json(value: list[Any]) -> Outcome:
    """Read what `outcome_to_json` returned."""
    kind, *rest = value
    if kind == "None":
        return None
    if kind == "Tag":
        return TagOutcome(rest[0])
    reason = RuleReason(*rest[:3])
    return (
        Drop(reason)
        if kind == "Drop"
        else Quarantine(reason)
        if kind == "Quarantine"
        else Edit(rest[3], rest[4], reason)
    )
