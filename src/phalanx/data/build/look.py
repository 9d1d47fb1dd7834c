"""What a finished dataset says of itself: its report, the account of a document, documents drawn at random."""

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from pydantic import ValidationError

from phalanx.data.borders import first_ids_of
from phalanx.data.build.encoding import TOKENIZER
from phalanx.data.build.finish import ACCOUNT_DIRECTORY, REPORT_FILE
from phalanx.data.build.records import import_zstd
from phalanx.data.build.report import BuildReport, LeftOut
from phalanx.data.build.tally import ByteTally, check_account
from phalanx.data.shards import Dataset, DocumentEntry, abbreviate_digests
from phalanx.errors import DataError

_MAX_REPORT_BYTES = 256 << 20
_MAX_LINE_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 18


def read_report(directory: Path) -> dict[str, Any]:
    """Read ``report.json``; `Dataset.verify` checks its signature."""
    path = directory / REPORT_FILE
    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_REPORT_BYTES + 1)
    except OSError as exc:
        raise DataError(
            f"{path}: cannot be read ({exc.strerror}); give the directory that `phalanx data build` made"
        ) from exc
    if len(content) > _MAX_REPORT_BYTES:
        raise DataError(f"{path}: exceeds the limit of {_MAX_REPORT_BYTES} bytes; restore it from a copy")
    try:
        return BuildReport.model_validate_json(content).model_dump(mode="json")
    except ValidationError as exc:
        raise DataError(
            f"{path}: is not the report of a dataset ({_first_error(exc)}); restore it from a copy"
        ) from exc


def signed_report(dataset: Dataset) -> dict[str, Any]:
    """Read the report of a dataset with a verified manifest."""
    _check_signed(dataset, REPORT_FILE)
    return read_report(dataset.directory)


def account_entries(dataset: Dataset, source: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield a line for everything that was left out: dropped, quarantined, or broken."""
    for name in sorted(dataset.manifest.files):
        if name.startswith(f"{ACCOUNT_DIRECTORY}/") and source in (None, Path(name).name.partition(".")[0]):
            _check_signed(dataset, name)
            yield from _decompress_lines(dataset.directory / name)


def _check_signed(dataset: Dataset, name: str) -> None:
    expected = dataset.manifest.files.get(name)
    path = dataset.directory / name
    if expected is None:
        raise DataError(f"{dataset.directory}: its manifest lacks {name}; it was not made by `phalanx data build`")
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); restore it from a copy") from exc
    if digest != expected.sha256:
        raise DataError(f"{path}: altered: differs from the signed file; restore it from a copy").with_facts(
            code="PHX-I027", file=str(path)
        )


def _decompress_lines(path: Path) -> Iterator[dict[str, Any]]:
    rest = b""
    try:
        with path.open("rb") as stream:
            blocks = import_zstd().ZstdDecompressor().stream_reader(stream)
            while block := blocks.read(_BLOCK_BYTES):
                *complete_lines, rest = (rest + block).split(b"\n")
                yield from map(_parse_entry, complete_lines)
                if len(rest) > _MAX_LINE_BYTES:
                    raise DataError(f"{path}: has a line of more than {_MAX_LINE_BYTES} bytes; restore it from a copy")
    except ValidationError as exc:
        raise DataError(f"{path}: has an invalid line ({_first_error(exc)}); restore it from a copy") from exc
    except (OSError, import_zstd().ZstdError) as exc:
        raise DataError(f"{path}: cannot be read ({exc}); restore it from a copy") from exc
    if rest:
        raise DataError(f"{path}: its last line is incomplete; restore it from a copy")


def _parse_entry(content: bytes) -> dict[str, Any]:
    return LeftOut.model_validate_json(content).model_dump(mode="json")


def _first_error(exc: ValidationError) -> str:
    error = exc.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"


def find_document(dataset: Dataset, name: str) -> list[dict[str, Any]]:
    """Return all that is known of documents of one name: where they are kept, or what left them out."""
    entries = [
        {
            "fate": "kept",
            "document": name,
            "source": dataset.manifest.sources[entry.source].name,
            "place": f"{group}.{split}",
            "digest": entry.digest,
            "fields": dict(entry.fields),
        }
        for group, splits in dataset.groups.items()
        for split in splits
        for entry in dataset.document_entries(group, split)
        if entry.name == name
    ]
    return [*entries, *(row for row in account_entries(dataset) if row.get("document") == name)]


@dataclass(frozen=True)
class DrawnDocument:
    """One document of a dataset."""

    group: str
    split: str
    number: int


def draw_documents(dataset: Dataset, count: int, seed: int, group: str | None = None) -> list[DrawnDocument]:
    """Draw documents at random, none twice; the same seed draws the same ones."""
    parts = [part for part in dataset.manifest.parts if group in (None, part.group)]
    if not parts:
        raise DataError(f"{dataset.directory}: has no group {group!r}; it has {', '.join(dataset.groups)}")
    total = sum(part.documents for part in parts)
    # a draw of what to look at, not of a secret
    numbers = random.Random(seed).sample(range(total), min(count, total))  # noqa: S311
    places = []
    for number in numbers:
        for part in parts:
            if number < part.documents:
                places.append(DrawnDocument(part.group, part.split, number))
                break
            number -= part.documents  # noqa: PLW2901
    return places


def read_tokens(dataset: Dataset, place: DrawnDocument) -> list[int]:
    """Return the tokens of one document, with its end token."""
    starts = dataset.document_starts(place.group, place.split)
    first, last = int(starts[place.number]), int(starts[place.number + 1])
    return [int(token) for token in np.asarray(dataset.tokens(place.group, place.split)[first:last])]


def verify_account(dataset: Dataset) -> None:
    """Add up documents and account of every source and compare them with the report."""
    report = signed_report(dataset)
    tallies = {source.name: ByteTally() for source in dataset.manifest.sources}
    for group, splits in dataset.groups.items():
        for split in splits:
            for entry in dataset.document_entries(group, split):
                sizes = {name: _integer_field(entry, name) for name in ("raw_bytes", "text_bytes")}
                tallies[dataset.manifest.sources[entry.source].name].count_document("kept", "kept", **sizes)
    for row in account_entries(dataset):
        if row["source"] not in tallies:
            raise _unknown_source_error(dataset, row["source"])
        sizes = {"raw_bytes": row["raw_bytes"], "text_bytes": row["text_bytes"]}
        tallies[row["source"]].count_document(row["fate"], row["step"], **sizes)
    for source in report["sources"]:
        if source["name"] not in tallies:
            raise _unknown_source_error(dataset, source["name"])
        check_account(source["name"], _reported_tally(source), tallies.pop(source["name"]))
    if tallies:
        raise DataError(f"{dataset.directory}: {REPORT_FILE} lacks the source {next(iter(tallies))!r}")


def _unknown_source_error(dataset: Dataset, name: str) -> DataError:
    return DataError(f"{dataset.directory}: the account has a source {name[:80]!r}, which the manifest lacks")


def _reported_tally(source: dict[str, Any]) -> ByteTally:
    tally = ByteTally()
    steps = {"read": {"read": source["read"]}, "broken": source["broken"], "edited": source["edited"]}
    for fate, by_step in steps.items():
        for step, measures in by_step.items():
            for name, value in measures.items():
                tally.counts[fate, step, name] += value
    return tally


def _integer_field(entry: DocumentEntry, name: str) -> int:
    value = entry.fields.get(name)
    if not isinstance(value, int):
        raise DataError(f"document {entry.name[:80]!r}: has no whole number of {name}; build the dataset again")
    return value


def check_tokenizer(dataset: Dataset) -> None:
    """Compare the tokenizer beside the shards with the tokenizer that made the tokens."""
    _tokenizer_bytes(dataset)


def _tokenizer_bytes(dataset: Dataset) -> bytes:
    path = dataset.directory / TOKENIZER
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); restore it from a copy") from exc
    expected = dataset.manifest.tokenizer.digest
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        has, expects = abbreviate_digests(digest, expected)
        raise DataError(
            f"{path}: has SHA-256 {has}, but the tokens were made with {expects}; restore it from a copy"
        ).with_facts(code="PHX-I027", file=str(path))
    return content


def sampled_documents(dataset: Dataset, count: int, seed: int, group: str | None) -> Iterator[dict[str, Any]]:
    """Yield documents drawn at random, with their texts."""
    backend = tokenizers.Tokenizer.from_str(_tokenizer_bytes(dataset).decode())
    first = list(first_ids_of(backend))
    for place in draw_documents(dataset, count, seed, group):
        entry = dataset.document_entry(place.group, place.split, place.number)
        *ids, _ = read_tokens(dataset, place)
        text_ids = ids[len(first) :] if ids[: len(first)] == first else ids
        yield {
            "document": entry.name,
            "source": dataset.manifest.sources[entry.source].name,
            "place": f"{place.group}.{place.split}, document {place.number}",
            "digest": entry.digest,
            "fields": dict(entry.fields),
            "tokens": len(ids),
            "text": backend.decode(text_ids, skip_special_tokens=False),
        }


_ABSENT = "-"


def compare_datasets(first: Dataset, second: Dataset) -> dict[str, Any]:
    """Return the differences of the second dataset."""
    reports = signed_report(first), signed_report(second)
    before, after = (_flatten_report(_comparable_report(report)) for report in reports)
    changed = [
        {"what": name, "before": before.get(name, _ABSENT), "after": after.get(name, _ABSENT)}
        for name in sorted(before.keys() | after.keys())
        if before.get(name, _ABSENT) != after.get(name, _ABSENT)
    ]
    digests = _document_digests(first), _document_digests(second)
    return {
        "same": first.digest == second.digest,
        "changed": changed,
        "documents": {
            "before": first.manifest.documents,
            "after": second.manifest.documents,
            "removed": int(np.setdiff1d(digests[0], digests[1], assume_unique=True).size),
            "added": int(np.setdiff1d(digests[1], digests[0], assume_unique=True).size),
        },
    }


def named_changes(first: Dataset, second: Dataset, most: int) -> Iterator[dict[str, str]]:
    """Yield documents that only one of two datasets has, `most` of each at most."""
    for change, dataset, other in (("removed", first, second), ("added", second, first)):
        other_digests = set(_document_digests(other).tolist())
        num_remaining = most
        for group, splits in dataset.groups.items():
            for split in splits:
                for entry in dataset.document_entries(group, split):
                    if num_remaining and bytes.fromhex(entry.digest) not in other_digests:
                        num_remaining -= 1
                        yield {"change": change, "document": entry.name, "digest": entry.digest}


def _document_digests(dataset: Dataset) -> NDArray[np.void]:
    table = dataset.index_table().read_all()
    return np.unique(np.ascontiguousarray(table["digest"]).view("V32").reshape(-1))


def _comparable_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report with names in place of positions, so that a source that came first moves no other one."""
    steps = {step["name"]: {"place": place, **step} for place, step in enumerate(report["steps"])}
    sources = {
        source["name"]: {name: value for name, value in source.items() if name not in ("samples", "name")}
        for source in report["sources"]
    }
    groups = {f"{group['group']}.{group['split']}": group for group in report["groups"]}
    rest = {name: report[name] for name in ("tokenizer", "versions")}
    return {"steps": steps, "sources": sources, "groups": groups, **rest}


def _flatten_report(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        inner = (_flatten_report(item, f"{name}.{key}".removeprefix(".")) for key, item in value.items())
        return {key: item for flat in inner for key, item in flat.items()}
    return {name: value}
