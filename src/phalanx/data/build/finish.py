"""The end of a build: shards, account and report from finished pieces, checked to the byte, then the manifest."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json, dump_toml
from phalanx.data.build.encoding import TOKENIZER, encoded_documents
from phalanx.data.build.passes import tool_versions
from phalanx.data.build.recipe import DataRecipe
from phalanx.data.build.records import RecordFile, encode_json_line, import_zstd
from phalanx.data.build.report import BuildReport
from phalanx.data.build.sift import ACCOUNT
from phalanx.data.build.steps import STEPS
from phalanx.data.build.store import WorkStore, sync_to_disk
from phalanx.data.build.tally import ByteTally, check_account
from phalanx.data.pack import token_dtype
from phalanx.data.shards import (
    DatasetFacts,
    DatasetManifest,
    DatasetWriter,
    DocumentEntry,
    RecipeRecord,
    SealKey,
    SourceFacts,
    TokenizerRecord,
    default_signing_key,
    load_signer,
)
from phalanx.errors import DataError

RECIPE_FILE, REPORT_FILE, ACCOUNT_DIRECTORY = "recipe.toml", "report.json", "account"
_SAMPLES = 5
"""Dropped texts of each source and step that the report shows."""


@dataclass
class SourceAccount:
    """What became of one source.

    Attributes:
        read: Bytes that were read, and edited on the way.
        samples: Lines of the account with the smallest digests, so that nothing but their content chose them.
    """

    fingerprint: str
    files: int
    read_tally: ByteTally = field(default_factory=ByteTally)
    outcome_tally: ByteTally = field(default_factory=ByteTally)
    samples: dict[str, list[tuple[str, dict[str, Any]]]] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetFinisher:
    """The constants of the end of a build.

    Attributes:
        inputs: Digest of all that decided the dataset.
        pieces: Number of the source of each piece in order, and the summary of each pass over it.
        tokenizer: Key and facts of the vocabulary.
        unseen: Names that a person has decided on, until a document of that name is met.
    """

    recipe: DataRecipe
    store: WorkStore
    directory: Path
    inputs: str
    pieces: Sequence[tuple[int, list[dict[str, Any]]]]
    encoded: Sequence[dict[str, Any]]
    tokenizer: dict[str, Any]
    unseen: set[str]

    def write_dataset(self) -> tuple[DatasetManifest, dict[str, Any]]:
        """Write the dataset; return its manifest and its report."""
        output = self.recipe.output
        seal = None if output.key is None else SealKey.from_file(output.key)
        signer = load_signer(output.signer or default_signing_key())
        ends = self._source_accounts()
        writer = DatasetWriter(
            self.directory, token_dtype(self.tokenizer["vocab_size"]), output.shard_tokens, seal=seal
        )
        with writer:
            groups = self._write_shards(writer, ends)
            accounts = self._write_account(ends)
            for name, count in zip(self.recipe.source_names, ends, strict=True):
                check_account(name, count.read_tally, count.outcome_tally)
            report = self._build_report(ends, groups)
            self._write_file(RECIPE_FILE, public_recipe(self.recipe).encode())
            self._write_file(REPORT_FILE, canonical_json(report))
            shutil.copyfile(self.store.work_directory(self.tokenizer["key"]) / TOKENIZER, self.directory / TOKENIZER)
            sync_to_disk(self.directory / TOKENIZER)
            return writer.finish_dataset(self._dataset_facts(ends, accounts), signer), report

    def _source_accounts(self) -> list[SourceAccount]:
        files: list[list[str]] = [[] for _ in self.recipe.sources]
        counts = [ByteTally() for _ in self.recipe.sources]
        for source, summaries in self.pieces:
            files[source] += [digest for _, digest in summaries[0]["files"]]
            for summary in summaries:
                counts[source].merge_tally(ByteTally.from_json(summary["tally"]))
        ends = []
        for config, digests, count in zip(self.recipe.sources, files, counts, strict=True):
            settings = config.model_dump(mode="json")
            fingerprint = hashlib.sha256(canonical_json([settings, digests])).hexdigest()
            ends.append(SourceAccount(fingerprint, len(digests), count))
        return ends

    def _write_shards(self, writer: DatasetWriter, ends: list[SourceAccount]) -> list[dict[str, Any]]:
        counts: dict[tuple[str, str], list[int]] = {}
        for (source, _), summary in zip(self.pieces, self.encoded, strict=True):
            group = self.recipe.group_of(source)
            for entry, ids in encoded_documents(self.store.work_directory(summary["key"]), summary["dtype"]):
                fields = entry["fields"]
                document = DocumentEntry(entry["digest"], source, entry["name"], fields)
                writer.part_writer(group, entry["split"]).add_document(ids, document)
                sizes = {"raw_bytes": fields.get("raw_bytes", 0), "text_bytes": fields["text_bytes"]}
                ends[source].outcome_tally.count_document("kept", "kept", **sizes)
                self.unseen.discard(entry["name"])
                count = counts.setdefault((group, entry["split"]), [0, 0])
                count[0] += 1
                count[1] += len(ids)
        if not any(split == "train" for _, split in counts):
            raise DataError(
                f"{self.directory}: no training document is left; `--dry-run` prints the steps that drop them, "
                "`phalanx data report` the fate of each"
            ).with_facts(code="PHX-I012", do="check --dry-run, or add text")
        return [
            {"group": group, "split": split, "documents": documents, "tokens": tokens}
            for (group, split), (documents, tokens) in sorted(counts.items())
        ]

    def _write_account(self, ends: list[SourceAccount]) -> list[str]:
        folder = self.directory / ACCOUNT_DIRECTORY
        folder.mkdir(exist_ok=True)
        written = []
        for number, name in enumerate(self.recipe.source_names):
            path = folder / f"{name}.jsonl.zst"
            with path.open("wb") as stream, import_zstd().ZstdCompressor(level=6).stream_writer(stream) as packed:
                for row in self._account_records(number):
                    packed.write(encode_json_line(row))
                    _count_left_out(row, ends[number])
                    self.unseen.discard(row["document"])
            sync_to_disk(path)
            written.append(f"{ACCOUNT_DIRECTORY}/{path.name}")
        return written

    def _account_records(self, source: int) -> Iterator[dict[str, Any]]:
        """Yield the lines of one source, pass by pass, so that it does not matter how files were put together."""
        of_source = [summaries for number, summaries in self.pieces if number == source]
        for summaries in zip(*of_source, strict=True):
            yield from read_account(self.store, summaries)

    def _build_report(self, ends: list[SourceAccount], groups: list[dict[str, Any]]) -> dict[str, Any]:
        recipe = self.recipe
        steps = [
            {
                "name": name,
                "kind": step.kind,
                "reference": STEPS[step.kind].reference,
                "settings": _report_settings(step),
            }
            for name, step in zip(recipe.step_names, recipe.steps, strict=True)
        ]
        report = {
            "inputs": self.inputs,
            "versions": tool_versions(),
            "steps": steps,
            "tokenizer": {name: value for name, value in self.tokenizer.items() if name != "key"},
            "groups": groups,
            "not_found": sorted(self.unseen),
            "sources": [self._source_report(number, count) for number, count in enumerate(ends)],
        }
        return BuildReport.model_validate_json(canonical_json(report)).model_dump(mode="json")

    def _source_report(self, number: int, end: SourceAccount) -> dict[str, Any]:
        config, name = self.recipe.sources[number], self.recipe.source_names[number]
        fates = {fate: end.outcome_tally.by_step(fate) for fate in ("dropped", "quarantined")}
        return {
            "name": name,
            "kind": config.kind,
            "group": self.recipe.group_of(number),
            "weight": config.weight,
            "licence": config.licence,
            "consent": config.consent,
            "fingerprint": end.fingerprint,
            "files": end.files,
            "read": end.read_tally.by_step("read").get("read", {}),
            "kept": end.outcome_tally.by_step("kept").get("kept", {}),
            "broken": end.outcome_tally.by_step("broken"),
            **fates,
            "edited": end.read_tally.by_step("edited"),
            "tagged": end.read_tally.by_step("tagged"),
            "released": end.read_tally.by_step("released"),
            "samples": {step: [row for _, row in lines] for step, lines in sorted(end.samples.items())},
        }

    def _dataset_facts(self, ends: list[SourceAccount], accounts: list[str]) -> DatasetFacts:
        recipe = self.recipe
        return DatasetFacts(
            sources=tuple(
                SourceFacts(
                    name=name,
                    kind=config.kind,
                    fingerprint=count.fingerprint,
                    licence=config.licence,
                    consent=config.consent,
                )
                for name, config, count in zip(recipe.source_names, recipe.sources, ends, strict=True)
            ),
            tokenizer=TokenizerRecord(**{n: v for n, v in self.tokenizer.items() if n != "key"}),
            recipe=RecipeRecord.from_content(public_recipe(recipe)),
            tools={name.lower(): version for name, version in tool_versions().items()},
            files=(RECIPE_FILE, REPORT_FILE, TOKENIZER, *accounts),
        )

    def _write_file(self, name: str, content: bytes) -> None:
        (self.directory / name).write_bytes(content)
        sync_to_disk(self.directory / name)


def read_account(store: WorkStore, summaries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the lines that some pieces have in the account, in their order."""
    for summary in summaries:
        yield from map(json.loads, RecordFile(store.work_directory(summary["key"]) / ACCOUNT))


def public_recipe(recipe: DataRecipe) -> str:
    """Return the resolved recipe as TOML, without the path of the signer's key, which is of one machine."""
    return dump_toml(recipe.model_copy(update={"output": recipe.output.model_copy(update={"signer": None})}))


def _report_settings(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.model_dump(mode="json").items() if name not in ("label", "kind")}


def _count_left_out(line: dict[str, Any], end: SourceAccount) -> None:
    end.outcome_tally.count_document(
        line["fate"], line["step"], raw_bytes=line["raw_bytes"], text_bytes=line["text_bytes"]
    )
    chosen = end.samples.setdefault(line["step"], [])
    order = hashlib.sha256(f"{line['document']} {line.get('digest')}".encode()).hexdigest()
    # all damage of one file has one digest; what came first stays
    chosen.append((order, line))
    chosen.sort(key=lambda sample: sample[0])
    del chosen[_SAMPLES:]
