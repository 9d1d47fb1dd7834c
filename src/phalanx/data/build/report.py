"""What a dataset says of how it was built: the report, and a line for everything that was left out.

Both are read with suspicion: a signature says which key wrote them, not that they make sense.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.config import StrictModel

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Change = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
Words = Annotated[str, Field(max_length=4096)]
Value = Annotated[str, Field(max_length=1 << 16)] | float | int


class ByteCounts(StrictModel):
    """Documents, and their sizes before and after the text was taken out."""

    documents: Count = 0
    raw_bytes: Count = 0
    text_bytes: Count = 0


class EditCounts(StrictModel):
    """Documents that a step edited, the places in them, and the bytes of text that came or went."""

    documents: Count
    places: Count
    net_bytes: Change


class DocumentCount(StrictModel):
    """Documents."""

    documents: Count


class LeftOut(StrictModel):
    """A line of the account: a document or record that is in no shard, and why.

    Attributes:
        step: That decided; ``damaged`` or ``unsupported`` of a record that gave no text.
        measure: Measured value of the step, or the reason why a record gave no text.
        digest: SHA-256 of the text as it was when it was left out.
    """

    source: Words
    document: Annotated[str, Field(max_length=1 << 16)]
    fate: Literal["dropped", "quarantined", "broken"]
    step: Words
    measure: Words
    value: Value
    limit: Value
    raw_bytes: Count
    text_bytes: Count
    digest: Words | None = None
    url: Annotated[str, Field(max_length=1 << 16)] | None = None
    excerpt: Words = ""


class StepReport(StrictModel):
    """One step, as the recipe has it."""

    name: Words
    kind: Words
    reference: Words
    settings: dict[str, Any]


class GroupReport(StrictModel):
    """One split of one mixture group."""

    group: Words
    split: Words
    documents: Count
    tokens: Count


class VocabularyReport(StrictModel):
    """The tokenizer that made the tokens."""

    kind: Words
    vocab_size: Count
    eos_id: Count
    digest: Words


class SourceReport(StrictModel):
    """The account of one source: counts by step, and samples of left-out documents of each step."""

    name: Words
    kind: Words
    group: Words
    weight: float | None
    licence: Words
    consent: Words
    fingerprint: Words
    files: Count
    read: ByteCounts
    kept: ByteCounts
    dropped: dict[str, ByteCounts]
    quarantined: dict[str, ByteCounts]
    broken: dict[str, ByteCounts]
    edited: dict[str, EditCounts]
    tagged: dict[str, DocumentCount]
    released: dict[str, DocumentCount]
    samples: dict[str, tuple[LeftOut, ...]]


class BuildReport(StrictModel):
    """The report of a build.

    Attributes:
        inputs: Digest of everything that decided the dataset.
        not_found: Names that the recipe releases or drops, and that no document has.
    """

    format: Literal[1] = 1
    inputs: Words
    versions: dict[str, Words]
    steps: tuple[StepReport, ...]
    tokenizer: VocabularyReport
    groups: tuple[GroupReport, ...]
    not_found: tuple[Words, ...] = ()
    sources: Annotated[tuple[SourceReport, ...], Field(min_length=1)]
