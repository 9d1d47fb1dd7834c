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
from phalanx.data.build.passes import BuildPass, code_digest, make_steps, pass_settings, plan_passes, versions
from phalanx.data.build.pieces import PieceReader, SourcePiece
from phalanx.data.build.recipe import DataRecipe
from phalanx.data.build.records import RecordFile, read_document
from phalanx.data.build.sift import DOCUMENTS, PieceWriter, Sieve, outcome_from_json, taken_in
from phalanx.data.build.store import WorkStore, key_of
from phalanx.data.rules import Outcome, Rule
from phalanx.data.sources import Source, open_source
from phalanx.errors import DataError

Task = dict[str, Any]
OUTCOMES = "outcomes"
"""The file of a corpus rule's decision: an outcome a record, in the order of all documents."""


@dataclass
class BuildWorker:
    """One process of a build.

    Attributes:
        code_home: Directory of the recipe, in which code of the user's own is looked for.
    """

    recipe: DataRecipe
    home: Path
    code_home: Path
    _sources: dict[int, Source] = field(default_factory=dict)

    def job(self) -> dict[str, Any]:
        """Return what makes the same worker in another process, or on another machine."""
        return {
            "recipe": self.recipe.model_dump(mode="json", exclude_none=True),
            "home": str(self.home),
            "code_home": str(self.code_home),
            "versions": versions(),
            "code": code_digest(),
        }

    @classmethod
    def of(cls, job: dict[str, Any]) -> "BuildWorker":
        """Make a worker.

        Raises:
            DataError: This machine has other versions than the machine that began the build, so other bytes could
                result.
        """
        if job["code"] != code_digest() or job["versions"] != versions():
            here = {name: value for name, value in versions().items() if job["versions"].get(name) != value}
            raise DataError(
                f"a worker has versions that differ from the build: {here or 'of the source code of Phalanx'}; "
                "install the same on every machine"
            )
        recipe = DataRecipe.model_validate_json(json.dumps(job["recipe"]))
        return cls(recipe, Path(job["home"]), Path(job["code_home"]))

    @cached_property
    def store(self) -> WorkStore:
        """Finished work."""
        return WorkStore(self.home)

    @cached_property
    def rules(self) -> list[Rule]:
        """Every step, built once."""
        return make_steps(self.recipe)

    @cached_property
    def passes(self) -> list[BuildPass]:
        """The passes that the steps come to."""
        return plan_passes(self.rules)

    def source(self, number: int) -> Source:
        """Return a source of the recipe, opened once."""
        if number not in self._sources:
            config = self.recipe.sources[number]
            if is_own(config.kind):
                open_own_code(config.kind, self.code_home)
            self._sources[number] = open_source(config)
        return self._sources[number]

    def perform(self, task: Task) -> dict[str, Any]:
        """Do one piece of work, unless it is there already; return its summary, with its key.

        Raises:
            DataError: Something that it reads is missing, malformed, or changes meanwhile.
            DiskError: The disk is full, or may not be written to.
        """
        return {"sift": self._sift, "encode": self._encode}[task["act"]](task)

    def _sift(self, task: Task) -> dict[str, Any]:
        build_pass = self.passes[task["pass"]]
        piece = SourcePiece.from_json(task["piece"])
        source = self.recipe.source_names[piece.source]
        settings = {"act": "sift", "source": source, **pass_settings(self.recipe, build_pass)}
        if build_pass.number == 0:
            return self._sift_files(build_pass, piece, settings)
        key = key_of({**settings, "input": task["input"], "decided": task["decided"]["digest"]})

        def work(directory: Path) -> dict[str, Any]:
            records = RecordFile(self.store.path(task["input"]) / DOCUMENTS)
            return self._filled(
                directory, build_pass, source, map(read_document, records), self._outcomes(task["decided"])
            )

        return {"key": key, **(self.store.find(key) or self.store.put(key, work))}

    def _sift_files(self, one: BuildPass, piece: SourcePiece, settings: dict[str, Any]) -> dict[str, Any]:
        reader = PieceReader(self.source(piece.source), piece)
        digests = reader.digests()
        config = self.recipe.sources[piece.source].model_dump(
            mode="json", exclude={"group", "licence", "consent", "weight"}
        )
        key = key_of(
            {
                **settings,
                "config": config,
                "limit": piece.limit,
                "span": None if piece.span is None else asdict(piece.span),
                "files": [*zip(piece.names or [""], digests, strict=True)],
            }
        )

        def work(directory: Path) -> dict[str, Any]:
            records = reader.records()
            summary = self._filled(directory, one, settings["source"], records, iter(()))
            reader.check_unchanged(digests)
            return {**summary, "files": piece.of_files(digests)}

        return {"key": key, **(self.store.find(key) or self.store.put(key, work))}

    def _filled(
        self,
        directory: Path,
        one: BuildPass,
        source: str,
        records: Iterator[Any],
        decided: Iterator[tuple[int, Outcome]],
    ) -> dict[str, Any]:
        with PieceWriter(directory, source, self.recipe.output.excerpt_characters) as out:
            if one.number == 0:
                records = taken_in(records, out.tally)
            Sieve(self.recipe, self.rules, one, source).sift(records, decided, out)
        return {"tally": out.tally.to_json(), "documents": len(RecordFile(directory / DOCUMENTS))}

    def _outcomes(self, decided: dict[str, Any]) -> Iterator[tuple[int, Outcome]]:
        if not decided["count"]:
            return
        records = RecordFile(self.store.path(decided["key"]) / OUTCOMES)
        first: int = decided["first"]
        for record in itertools.islice(records.since(first), decided["count"]):
            number, outcome = json.loads(record)
            yield number - decided["start"], outcome_from_json(outcome)

    def _encode(self, task: Task) -> dict[str, Any]:
        key = encoding_key(self.recipe, task)
        documents = self.store.path(task["input"]) / DOCUMENTS

        def work(directory: Path) -> dict[str, Any]:
            encoder = encoder_of(self.store.path(task["tokenizer"]), task["size_bytes"])
            return encode_piece(directory, map(read_document, RecordFile(documents)), encoder, self.recipe.output)

        return {"key": key, **(self.store.find(key) or self.store.put(key, work))}
