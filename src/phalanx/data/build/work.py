"""What one process does for a build: pieces of passes, and pieces of encoding; tasks and results are plain data."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.config import is_own, open_own_code
from phalanx.data.build.encoding import encode_piece, encoder_of, encoding_key
from phalanx.data.build.passes import BuildPass, code_digest, make_steps, pass_settings, plan_passes, tool_versions
from phalanx.data.build.pieces import PieceReader, SourcePiece
from phalanx.data.build.recipe import DataRecipe
from phalanx.data.build.records import RecordFile, decode_document
from phalanx.data.build.sift import DOCUMENTS, PassFilter, PieceWriter, count_records, outcome_from_json
from phalanx.data.build.store import WorkStore, work_key
from phalanx.data.rules import Outcome, Rule
from phalanx.data.sources import Source, open_source
from phalanx.errors import DataError

Task = dict[str, Any]
OUTCOMES = "outcomes"
"""The file of a corpus rule's decision: an outcome a record, in the order of all documents."""


@dataclass
class BuildWorker:
    """One process of a build."""

    recipe: DataRecipe
    home: Path
    code_home: Path
    _sources: dict[int, Source] = field(default_factory=dict)

    def to_job(self) -> dict[str, Any]:
        """Return what makes the same worker in another process, or on another machine."""
        return {
            "recipe": self.recipe.model_dump(mode="json", exclude_none=True),
            "home": str(self.home),
            "code_home": str(self.code_home),
            "versions": tool_versions(),
            "code": code_digest(),
        }

    @classmethod
    def from_job(cls, job: dict[str, Any]) -> "BuildWorker":
        """Make a worker.

        Raises:
            DataError: This machine has other versions than the machine that began the build, so other bytes could
                result.
        """
        if job["code"] != code_digest() or job["versions"] != tool_versions():
            here = {name: value for name, value in tool_versions().items() if job["versions"].get(name) != value}
            raise DataError(
                f"a worker has versions that differ from the build: {here or 'of the source code of Phalanx'}; "
                "install the same on every machine"
            )
        recipe = DataRecipe.model_validate_json(json.dumps(job["recipe"]))
        return cls(recipe, Path(job["home"]), Path(job["code_home"]))

    @cached_property
    def work_store(self) -> WorkStore:
        """Finished work."""
        return WorkStore(self.home)

    @cached_property
    def step_rules(self) -> list[Rule]:
        """Every step, built once."""
        return make_steps(self.recipe)

    @cached_property
    def build_passes(self) -> list[BuildPass]:
        """The passes that the steps come to."""
        return plan_passes(self.step_rules)

    def open_recipe_source(self, number: int) -> Source:
        """Return a source of the recipe, opened once."""
        if number not in self._sources:
            config = self.recipe.sources[number]
            if is_own(config.kind):
                open_own_code(config.kind, self.code_home)
            self._sources[number] = open_source(config)
        return self._sources[number]

    def perform_task(self, task: Task) -> dict[str, Any]:
        """Do one piece of work, unless it is there already; return its summary, with its key."""
        return {"sift": self._filter_piece, "encode": self._encode_piece}[task["act"]](task)

    def _filter_piece(self, task: Task) -> dict[str, Any]:
        build_pass = self.build_passes[task["pass"]]
        piece = SourcePiece.from_json(task["piece"])
        source = self.recipe.source_names[piece.source]
        settings = {"act": "sift", "source": source, **pass_settings(self.recipe, build_pass)}
        if build_pass.number == 0:
            return self._filter_files(build_pass, piece, settings)
        key = work_key({**settings, "input": task["input"], "decided": task["decided"]["digest"]})

        def work(directory: Path) -> dict[str, Any]:
            records = RecordFile(self.work_store.work_directory(task["input"]) / DOCUMENTS)
            return self._fill_directory(
                directory, build_pass, source, map(decode_document, records), self._read_outcomes(task["decided"])
            )

        return {"key": key, **(self.work_store.find_summary(key) or self.work_store.store_work(key, work))}

    def _filter_files(self, one: BuildPass, piece: SourcePiece, settings: dict[str, Any]) -> dict[str, Any]:
        reader = PieceReader(self.open_recipe_source(piece.source), piece)
        digests = reader.digest_files()
        config = self.recipe.sources[piece.source].model_dump(
            mode="json", exclude={"group", "licence", "consent", "weight"}
        )
        key = work_key(
            {
                **settings,
                "config": config,
                "limit": piece.limit,
                "span": None if piece.span is None else asdict(piece.span),
                "files": [*zip(piece.names or [""], digests, strict=True)],
            }
        )

        def work(directory: Path) -> dict[str, Any]:
            records = reader.read_records()
            summary = self._fill_directory(directory, one, settings["source"], records, iter(()))
            reader.check_unchanged(digests)
            return {**summary, "files": piece.file_digests(digests)}

        return {"key": key, **(self.work_store.find_summary(key) or self.work_store.store_work(key, work))}

    def _fill_directory(
        self,
        directory: Path,
        one: BuildPass,
        source: str,
        records: Iterator[Any],
        decided: Iterator[tuple[int, Outcome]],
    ) -> dict[str, Any]:
        with PieceWriter(directory, source, self.recipe.output.excerpt_characters) as out:
            if one.number == 0:
                records = count_records(records, out.tally)
            PassFilter(self.recipe, self.step_rules, one, source).filter_documents(records, decided, out)
        return {"tally": out.tally.to_json(), "documents": len(RecordFile(directory / DOCUMENTS))}

    def _read_outcomes(self, decided: dict[str, Any]) -> Iterator[tuple[int, Outcome]]:
        if not decided["count"]:
            return
        records = RecordFile(self.work_store.work_directory(decided["key"]) / OUTCOMES)
        first: int = decided["first"]
        for record in itertools.islice(records.iterate_from(first), decided["count"]):
            number, outcome = json.loads(record)
            yield number - decided["start"], outcome_from_json(outcome)

    def _encode_piece(self, task: Task) -> dict[str, Any]:
        key = encoding_key(self.recipe, task)
        documents = self.work_store.work_directory(task["input"]) / DOCUMENTS

        def work(directory: Path) -> dict[str, Any]:
            encoder = encoder_of(self.work_store.work_directory(task["tokenizer"]), task["size_bytes"])
            return encode_piece(directory, map(decode_document, RecordFile(documents)), encoder, self.recipe.output)

        return {"key": key, **(self.work_store.find_summary(key) or self.work_store.store_work(key, work))}
