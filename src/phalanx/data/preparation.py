"""Sources to token shards, once; the second time it is found by its key and checked."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from phalanx.config import canonical_json
from phalanx.data.chat_preparation import ChatJob, prepare_conversations
from phalanx.data.config import BpeConfig, DataConfig
from phalanx.data.corpus import Corpus, SequenceLayout
from phalanx.data.dataset_corpus import open_shards
from phalanx.data.manifest import FORMAT, CorpusManifest, SplitRecord
from phalanx.data.own_shards import GROUP, SPLITS, ShardPlace
from phalanx.data.pack import pack_split, token_dtype
from phalanx.data.prepared_corpus import MANIFEST_FILE, open_corpus
from phalanx.data.publish import publish_directory
from phalanx.data.run_dataset import local_dataset
from phalanx.data.shards import DatasetWriter
from phalanx.data.sources import Source, no_text, open_source
from phalanx.data.spool import Intake, Progress, Spool
from phalanx.data.tokenizers.encoder import Encoder
from phalanx.data.tokenizers.tokenizer import (
    TOKENIZER_FILE,
    TextTokenizer,
    fingerprint_tokenizer,
    load_tokenizer,
    named_tokenizer,
)
from phalanx.data.tokenizers.training import train_bpe
from phalanx.errors import DataError


def prepare_corpus(
    config: DataConfig,
    cache_dir: Path,
    seed: int,
    tokenizer_path: Path | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Read, split and tokenise the sources into shards, or open what an earlier call made; or open a dataset.

    Args:
        config: Sources and cutting; conversations are rendered before.
        cache_dir: Results live here, each under a digest of all that decided it (file contents included).
        tokenizer_path: The model's directory or ``tokenizer.json``, for a tokenizer of kind "model".
        progress: Told a phase ("read", "vocabulary", "encode") and the documents done in it.

    Raises:
        DataError: A source is missing, malformed or empty, there is too little text, or the cache is damaged.
        ConfigError: A tokenizer of kind "model" and no model directory.

    Guarantees:
        The same content, config, seed and library versions give the same bytes, whatever the number of
        threads. A crash leaves no half-made result. No text is in both splits, up to exact equality.
    """
    if config.dataset is not None:
        directory = local_dataset(config.dataset, cache_dir)
        return open_shards(config, config.dataset, directory, named_tokenizer(config.tokenizer, tokenizer_path))
    if config.conversations is not None:
        return prepare_conversations(
            config, config.conversations, ChatJob(cache_dir, seed, tokenizer_path, progress or _ignore_progress)
        )
    # said outright, the encoder uses threads and does not warn when the process forks later
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sources = [open_source(source) for source in config.sources]
    fingerprints = [source.fingerprint() for source in sources]
    key = _corpus_key(config, seed, fingerprints, fingerprint_tokenizer(config.tokenizer, tokenizer_path))
    place = ShardPlace.from_cache(cache_dir, key)
    home = place.home
    if not home.exists():
        build = _PreparationJob(key, place, seed, fingerprints, tokenizer_path, progress or _ignore_progress)
        publish_directory(home, lambda directory: _fill_shards(directory, config, sources, build))
    corpus = open_corpus(home, SequenceLayout.from_config(config), place.signer_fingerprint)
    if corpus.manifest.key != key:
        raise DataError(f"{home}: has the data of another config; delete it to make the data again").with_facts(
            code="PHX-I018", file=str(home), do="delete it"
        )
    return corpus


@dataclass(frozen=True)
class _PreparationJob:
    """The constants of one corpus's preparation."""

    key: str
    place: ShardPlace
    seed: int
    fingerprints: list[str]
    tokenizer_path: Path | None
    report: Progress


def _fill_shards(directory: Path, config: DataConfig, sources: list[Source], job: _PreparationJob) -> None:
    intake = Intake(job.seed, config.validation_share, config.max_documents)
    kinds = [source.kind for source in config.sources]
    spool = intake.spool_sources(zip(kinds, sources, strict=True), directory, job.report)
    _check_text(spool, config, job)
    tokenizer = _prepare_tokenizer(config, spool, job)
    (directory / TOKENIZER_FILE).write_bytes(tokenizer.to_json())
    length, encoder = config.sequence_length, Encoder(tokenizer, spool.train.size_bytes + spool.validation.size_bytes)
    dtype, record = token_dtype(tokenizer.vocab_size), tokenizer.manifest_record(config.tokenizer.kind)
    with DatasetWriter(directory, dtype) as writer:
        train, validation = (
            pack_split(part, encoder, length, writer.part_writer(GROUP, name), job.report)
            for part, name in zip((spool.train, spool.validation), SPLITS, strict=True)
        )
        _check_length(train, validation, config)
        manifest = CorpusManifest(
            key=job.key,
            seed=job.seed,
            sequence_length=length,
            token_dtype=dtype,
            sources=tuple(spool.sources),
            tokenizer=record,
            train=train,
            validation=validation,
        )
        (directory / MANIFEST_FILE).write_bytes(canonical_json(manifest.model_dump(mode="json")))
        job.place.sign_shards(writer, config, spool.sources, record, (MANIFEST_FILE,))
    spool.train.path.unlink()
    spool.validation.path.unlink()


def _corpus_key(config: DataConfig, seed: int, fingerprints: list[str], tokenizer: str) -> str:
    decided_by = {
        "format": FORMAT,
        "seed": seed,
        "sources": fingerprints,
        "tokenizer": tokenizer,
        "sequence_length": config.sequence_length,
        "validation_share": config.validation_share,
        "max_documents": config.max_documents,
    }
    return hashlib.sha256(canonical_json(decided_by)).hexdigest()


def _prepare_tokenizer(config: DataConfig, spool: Spool, job: _PreparationJob) -> TextTokenizer:
    if not isinstance(config.tokenizer, BpeConfig):
        return load_tokenizer(config.tokenizer, job.tokenizer_path)
    job.report("vocabulary", 0)
    tokenizer = train_bpe(spool.train.kept_texts(), config.tokenizer)
    job.report("vocabulary", spool.train.documents)
    return tokenizer


def _check_text(spool: Spool, config: DataConfig, job: _PreparationJob) -> None:
    for source, counts, fingerprint in zip(config.sources, spool.sources, job.fingerprints, strict=True):
        if counts.fingerprint != fingerprint:
            raise DataError(f"data.sources, kind {counts.kind!r}: a file changed while it was read; run again")
        if counts.size_bytes == 0 and config.max_documents is None:
            raise no_text(source)
    if spool.train.documents == 0:
        raise DataError(
            f"data: no training document is left ({spool.validation.documents} for validation); add text"
        ).with_facts(code="PHX-I012", do="add text")


def _check_length(train: SplitRecord, validation: SplitRecord, config: DataConfig) -> None:
    needed = config.sequence_length + 1
    if train.sequences == 0:
        raise DataError(
            f"data: the training split has {train.tokens} tokens, but one sequence needs {needed}; add text or "
            "lower data.sequence_length"
        ).with_facts(code="PHX-I012", do="add text or lower data.sequence_length")
    if config.validation_share > 0 and validation.sequences == 0:
        do = "raise data.validation_share, add documents, or " + (
            "set the share to 0" if config.validation else "name a set in data.validation and set the share to 0"
        )
        raise DataError(
            f"data: the validation split has {validation.tokens} tokens in {validation.documents} documents, but "
            f"one sequence needs {needed}; {do}"
        ).with_facts(code="PHX-I012", do=do)


def _ignore_progress(_phase: str, _documents: int) -> None:
    return None
