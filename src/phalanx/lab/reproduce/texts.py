"""Text to pre-train on and to fine-tune on: some that every installation has, some from data files."""

import ast
import gzip
import hashlib
import importlib.util
import json
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from phalanx.config import canonical_json
from phalanx.data import BpeConfig, Corpus, DataConfig, PythonDocstringsConfig, PythonManualConfig, prepare_corpus
from phalanx.data.config import FileTokenizerConfig
from phalanx.data.sources import Document, JsonlConfig, Source, open_source
from phalanx.data.sources.files import SourceFile, fingerprint_files, read_bytes
from phalanx.data.sources.python_docstrings import PythonDocstrings
from phalanx.data.tasks import TASKS
from phalanx.data.tasks.task import find_file
from phalanx.errors import DataError
from phalanx.lab.reproduce.workload import SEQUENCE_LENGTH, VOCAB_SIZE, Regime, TableSize

SPLIT_SEED = 0
_DOCUMENT_CHARACTERS = 4000
_MIN_CHARACTERS = 4 * _DOCUMENT_CHARACTERS
"""Fewer documents may leave one of the two splits empty."""
_MAX_VALIDATION_SEQUENCES = 128


class StandardLibraryCode:
    """Modules of the standard library as bare code: no comments, no docstrings."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        self._files = sorted((SourceFile(path.name, path) for path in root.glob("*.py")), key=lambda file: file.name)
        if not self._files:
            raise DataError(f"{root}: holds no .py files; this Python was installed without its library's sources")

    def fingerprint(self) -> str:
        """Digest of names and contents of the modules."""
        return fingerprint_files(self._files, "bare code")

    def documents(self) -> Iterator[Document]:
        """Modules by name."""
        for file in self._files:
            yield Document(f"code of {file.name}", _bare_code(Path(file.path)))


def library_docstrings() -> Source:
    """Docstrings of the models in the installed transformers: English about something else than the three domains."""
    module_spec = importlib.util.find_spec("transformers")
    if module_spec is None or module_spec.origin is None:
        raise DataError("transformers: its sources are not there; install it from a wheel")
    return PythonDocstrings(PythonDocstringsConfig(), Path(module_spec.origin).parent / "models")


class TextList:
    """Texts that were read from a data file."""

    def __init__(self, name: str, texts: Iterable[str]) -> None:
        self._name = name
        self._texts = tuple(texts)

    def fingerprint(self) -> str:
        """Digest of the texts."""
        return hashlib.sha256(canonical_json([self._name, self._texts])).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Texts in the order of the file."""
        for number, text in enumerate(self._texts):
            yield Document(f"{self._name} {number}", text)


_ARTICLE = re.compile(r"\n (?== [^=])")
"""The line before an article's title, which has one equals sign on each side; a section's has more."""
_WIKITEXT = "it is a part of WikiText-2, gzip of UTF-8"


def _wikitext_articles(file: str, home: Path | None) -> Source:
    with gzip.open(find_file(home, file, _WIKITEXT), "rt", encoding="utf-8") as stream:
        return TextList(file, _ARTICLE.split(stream.read()))


def _medical_answers(home: Path | None) -> Source:
    return TextList("medquad", (example.text for example in TASKS["medquad"].load(home).examples))


_SOURCES: Mapping[str, Callable[[Path | None], Source]] = MappingProxyType(
    {
        "manual": lambda home: open_source(PythonManualConfig()),
        "docstrings": lambda home: open_source(PythonDocstringsConfig()),
        "code": lambda home: StandardLibraryCode(),
        "wikitext": lambda home: _wikitext_articles("wikitext2_test.txt.gz", home),
        "medical": _medical_answers,
        "encyclopedia": lambda home: _wikitext_articles("wikitext2_valid.txt.gz", home),
    }
)
"""By the name of a domain or of a further text; the argument is the directory of data files."""

DOMAINS: Mapping[str, str] = MappingProxyType(
    {
        "wikitext": "articles of wikitext-2's test file (pre-training has those of its validation file)",
        "medical": "answers of MedQuAD (pre-training has other answers)",
        "manual": "the language reference that CPython carries (prose)",
        "docstrings": "docstrings of the standard library (near the pre-training text)",
        "code": "the standard library itself without comments and docstrings (far from it)",
    }
)
"""Kinds of text; a size has three of them, as the paper has three data sets."""


def pretraining_corpus(cache: Path, size: TableSize, home: Path | None = None) -> Corpus:
    """Text A, with the vocabulary that everything shares."""
    paths = [_write_selection(library_docstrings(), "pretraining", size.pretraining_characters, cache)]
    paths += [_write_selection(_SOURCES[name](home), name, count, cache) for name, count in size.further_texts]
    config = DataConfig(
        sources=tuple(JsonlConfig(path=path) for path in paths),
        tokenizer=BpeConfig(vocab_size=VOCAB_SIZE),
        sequence_length=SEQUENCE_LENGTH,
        max_validation_sequences=_MAX_VALIDATION_SEQUENCES,
    )
    return prepare_corpus(config, cache / "data", SPLIT_SEED)


def later_text(size: TableSize, characters: int, tokenizer: Path, cache: Path) -> DataConfig:
    """Documents of the kind of text A that come after those documents: further training text of a public model."""
    path = _write_selection(library_docstrings(), "later", characters, cache, after=size.pretraining_characters)
    return DataConfig(
        sources=(JsonlConfig(path=path),),
        tokenizer=FileTokenizerConfig(path=tokenizer),
        sequence_length=SEQUENCE_LENGTH,
        validation_share=0.3,
        max_validation_sequences=_MAX_VALIDATION_SEQUENCES,
    )


def domain_data(
    domain: str, regime: Regime, size: TableSize, tokenizer: Path, cache: Path, home: Path | None = None
) -> DataConfig:
    """What a fine-tuning on one domain reads; documents are split, never sequences."""
    characters = max(_MIN_CHARACTERS, int(regime.characters * size.text_share))
    after = dict(size.further_texts).get(domain, 0)
    path = _write_selection(_SOURCES[domain](home), domain, characters, cache, after=after)
    return DataConfig(
        sources=(JsonlConfig(path=path),),
        tokenizer=FileTokenizerConfig(path=tokenizer),
        sequence_length=SEQUENCE_LENGTH,
        validation_share=regime.validation_share,
        max_validation_sequences=size.validation_sequences,
    )


def _write_selection(source: Source, name: str, characters: int, cache: Path, *, after: int = 0) -> Path:
    """Write the first part of each document to one file, documents in the order of their hash, until it is enough.

    With `after`, the documents that so many characters take are left out.
    """
    key = canonical_json([name, source.fingerprint(), characters, _DOCUMENT_CHARACTERS, *([after] if after else [])])
    path = cache / "reproduce" / f"{name}-{hashlib.sha256(key).hexdigest()[:16]}.jsonl"
    if path.is_file():
        return path
    texts = sorted((d.text for d in source.documents()), key=_text_hash)
    left_out = sum(1 for _ in _take_until_enough(texts, after)) if after else 0
    chosen = list(_take_until_enough(texts, after + characters))[left_out:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen), encoding="utf-8")
        unfinished.rename(path)
    except OSError as exc:
        raise DataError(f"{path}: cannot be written ({exc.strerror}); set PHALANX_CACHE to another place") from exc
    return path


def _take_until_enough(texts: Iterable[str], characters: int) -> Iterator[str]:
    total = 0
    for text in texts:
        part = text[:_DOCUMENT_CHARACTERS].strip()
        if len(part) < 200:
            continue
        yield part
        total += len(part)
        if total >= characters:
            return


def _text_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _bare_code(path: Path) -> str:
    try:
        with warnings.catch_warnings():
            # an invalid escape in another author's module is not the user's business
            warnings.simplefilter("ignore")
            tree = ast.parse(read_bytes(path))
    except (SyntaxError, ValueError) as exc:
        raise DataError(f"{path}: cannot be parsed ({exc}); repair this Python installation") from exc
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
