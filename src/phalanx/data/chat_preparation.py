"""Conversations to a corpus, once: read, split, rendered and encoded; the second time it is found by its key."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.config import canonical_json
from phalanx.data.chat.conversation import Conversation
from phalanx.data.chat.encoding import ChatEncoder, EncodedConversation
from phalanx.data.chat.files import ConversationFiles, conversation_from_text
from phalanx.data.chat.settings import OF_MODEL, ConversationsConfig
from phalanx.data.chat.template import (
    DEFAULT_TEMPLATES,
    MARKS,
    TEMPLATE_FILE,
    ChatTemplate,
    default_template,
    model_template,
    template_from_file,
)
from phalanx.data.chat_corpus import (
    FORMAT,
    MANIFEST_FILE,
    ChatCorpus,
    ChatManifest,
    ChatSplitRecord,
    open_conversations,
    weights_file,
)
from phalanx.data.config import BpeConfig, DataConfig
from phalanx.data.corpus import SequenceLayout
from phalanx.data.manifest import TokenizerRecord
from phalanx.data.own_shards import GROUP, SPLITS, ShardPlace
from phalanx.data.pack import document_entry, token_dtype
from phalanx.data.publish import publish_directory
from phalanx.data.shards import DatasetWriter, PartWriter
from phalanx.data.sources import BrokenRecord
from phalanx.data.spool import Intake, KeptText, Progress, SplitSpool, Spool, clean_text
from phalanx.data.tokenizers.config import ByteBpeTraining
from phalanx.data.tokenizers.tokenizer import (
    TOKENIZER_FILE,
    TextTokenizer,
    fingerprint_tokenizer,
    load_tokenizer,
    locate_tokenizer,
)
from phalanx.data.tokenizers.training import train_tokenizer
from phalanx.errors import DataError

_NAMED = 3
"""Dropped conversations that are told by name."""
_CHANGED = "a file changed while it was read; run again"


@dataclass(frozen=True)
class ChatJob:
    """Where and how a corpus of conversations is made.

    Attributes:
        tokenizer_path: The model's directory, or its ``tokenizer.json``.
    """

    cache_dir: Path
    seed: int
    tokenizer_path: Path | None
    report: Progress


def prepare_conversations(config: DataConfig, wanted: ConversationsConfig, job: ChatJob) -> ChatCorpus:
    """Read, split, render and encode conversations, or open the result of an earlier call.

    Raises:
        DataError: A source is missing or empty; a conversation is broken or too long and the run file does not drop
            such, with file and line; the tokenizer lacks tokens that the template writes; or the cache is damaged.
        ModelError: The template is broken, or does or takes what no template may.

    Guarantees:
        The same content, config, seed and library versions give the same bytes. No conversation is in both splits.
    """
    template = _find_template(config, wanted, job)
    sources = [ConversationFiles(source, wanted.broken) for source in wanted.sources]
    fingerprints = [source.fingerprint() for source in sources]
    decided_by = {
        "format": FORMAT,
        "seed": job.seed,
        "sources": fingerprints,
        "tokenizer": fingerprint_tokenizer(config.tokenizer, job.tokenizer_path),
        "template": [template.source, dict(template.tokens)],
        "sequence_length": config.sequence_length,
        "validation_share": config.validation_share,
        "max_documents": config.max_documents,
        "policies": [wanted.too_long, wanted.broken, wanted.weighted],
    }
    key = hashlib.sha256(canonical_json(decided_by)).hexdigest()
    place = ShardPlace.from_cache(job.cache_dir, key, "chat-")
    if not place.home.exists():
        build = _ChatBuild(config, wanted, sources, template, job)
        publish_directory(place.home, lambda directory: build.fill_directory(directory, place, key, fingerprints))
    return open_conversations(place.home, SequenceLayout.from_config(config), place.signer_fingerprint)


class _ChatBuild:
    """The making of one corpus."""

    def __init__(
        self,
        config: DataConfig,
        wanted: ConversationsConfig,
        sources: list[ConversationFiles],
        template: ChatTemplate,
        job: ChatJob,
    ) -> None:
        self._config, self._wanted, self._sources, self._template = config, wanted, sources, template
        self._job = job
        self._dropped: Counter[str] = Counter()
        self._cut = 0
        self._to_name: dict[bytes, str] = {}

    def fill_directory(self, directory: Path, place: ShardPlace, key: str, fingerprints: list[str]) -> None:
        """Write and sign all files.

        Args:
            fingerprints: Those of the sources from which the key was made.
        """
        config, job = self._config, self._job
        intake = Intake(job.seed, config.validation_share, config.max_documents)
        named = ((config.kind, source) for config, source in zip(self._wanted.sources, self._sources, strict=True))
        spool = intake.spool_sources(named, directory, job.report)
        if [counts.fingerprint for counts in spool.sources] != fingerprints:
            raise DataError(f"data.conversations: {_CHANGED}")
        broken = self._broken_records()
        if not spool.train.documents:
            detail = f"; the first broken line is {broken[0].name}: {broken[0].reason}" if broken else ""
            raise DataError(f"data.conversations: no training conversation is left{detail}").with_facts(code="PHX-I012")
        tokenizer = self._make_tokenizer(spool)
        (directory / TOKENIZER_FILE).write_bytes(tokenizer.to_json())
        (directory / TEMPLATE_FILE).write_text(self._template.source, encoding="utf-8", newline="")
        dtype, record = token_dtype(tokenizer.vocab_size), tokenizer.manifest_record(config.tokenizer.kind)
        with DatasetWriter(directory, dtype) as writer:
            with ChatEncoder(self._template, tokenizer.backend) as encoder:
                train, held_out = (
                    self._write_split(encoder, part, writer.part_writer(GROUP, name), weights_file(directory, name))
                    for part, name in zip((spool.train, spool.validation), SPLITS, strict=True)
                )
                end_of_turn = encoder.end_of_turn
            self._check_splits(train, held_out)
            manifest = self._make_manifest(spool, record, (train, held_out), key, end_of_turn)
            (directory / MANIFEST_FILE).write_bytes(canonical_json(manifest.model_dump(mode="json")))
            weights = (weights_file(directory, name).name for name in SPLITS)
            place.sign_shards(writer, config, spool.sources, record, (MANIFEST_FILE, TEMPLATE_FILE, *weights))
        spool.train.path.unlink()
        spool.validation.path.unlink()

    def _make_manifest(
        self,
        spool: Spool,
        record: TokenizerRecord,
        splits: tuple[ChatSplitRecord, ChatSplitRecord],
        key: str,
        end_of_turn: int | None,
    ) -> ChatManifest:
        broken = self._broken_records()
        self._dropped.update({"broken": len(broken)} if broken else {})
        examples = [*(f"{record.name}: {record.reason}" for record in broken[:_NAMED]), *self._dropped_names()]
        return ChatManifest(
            key=key,
            token_dtype=token_dtype(record.vocab_size),
            sources=tuple(spool.sources),
            tokenizer=record,
            template=self._template.name
            if self._template.name in DEFAULT_TEMPLATES
            else Path(self._template.name).name,
            template_digest=hashlib.sha256(self._template.source.encode()).hexdigest(),
            end_of_turn=end_of_turn,
            train=splits[0],
            validation=splits[1],
            cut=self._cut,
            dropped=dict(self._dropped),
            examples=tuple(examples),
        )

    def _broken_records(self) -> list[BrokenRecord]:
        return [record for source in self._sources for record in source.dropped]

    def _make_tokenizer(self, spool: Spool) -> TextTokenizer:
        tokenizer_config = self._config.tokenizer
        if not isinstance(tokenizer_config, BpeConfig):
            return load_tokenizer(tokenizer_config, self._job.tokenizer_path)
        marks = MARKS if any(mark in self._template.source for mark in MARKS) else ()
        texts = (
            message.content
            for text in spool.train.kept_texts()
            for message in conversation_from_text(text).messages
            if message.content
        )
        training = ByteBpeTraining(vocab_size=tokenizer_config.vocab_size, special_tokens=marks)
        self._job.report("vocabulary", spool.train.documents)
        return train_tokenizer(texts, training, "data.tokenizer")

    def _write_split(self, encoder: ChatEncoder, spool: SplitSpool, part: PartWriter, weights: Path) -> ChatSplitRecord:
        starts, targets, tokens, weighed = [0], 0, hashlib.sha256(), hashlib.sha256()
        with weights.open("wb") as stream:
            for document, encoded in self._encode_kept(encoder, spool.kept_documents()):
                ids, of_ids = encoded.ids.astype(part.dtype), encoded.weights.astype("<f4")
                part.add_document(ids, document_entry(document))
                stream.write(of_ids.data)
                tokens.update(ids.data)
                weighed.update(of_ids.data)
                starts.append(part.tokens)
                # the first token is nothing that can be foretold
                targets += int((encoded.weights[1:] > 0).sum())
                if part.documents % 100 == 0:
                    self._job.report("encode", part.documents)
        began = hashlib.sha256(np.array(starts, dtype="<i8").tobytes())
        return ChatSplitRecord(
            conversations=part.documents,
            tokens=part.tokens,
            targets=targets,
            digests=(tokens.hexdigest(), weighed.hexdigest(), began.hexdigest()),
        )

    def _encode_kept(
        self, encoder: ChatEncoder, kept: Iterable[KeptText]
    ) -> Iterator[tuple[KeptText, EncodedConversation]]:
        for document in kept:
            text = document.text
            conversation = conversation_from_text(text)
            try:
                self._check_weights(conversation)
                encoded = encoder.encode_conversation(conversation)
            except DataError as exc:
                self._drop_conversation(text, "not rendered", str(exc), keeps=self._wanted.broken == "drop", cause=exc)
                continue
            length, max_tokens = len(encoded.ids), self._config.sequence_length
            if length > max_tokens and self._wanted.too_long == "cut":
                encoded = EncodedConversation(encoded.ids[:max_tokens], encoded.weights[:max_tokens])
            elif length > max_tokens:
                why = f"has {length} tokens, data.sequence_length is {max_tokens}; raise it, or set too_long"
                self._drop_conversation(text, "too long", why, keeps=self._wanted.too_long == "drop")
                continue
            if not (encoded.weights[1:] > 0).any():
                why = "no token of the assistant's text fits into the row"
                self._drop_conversation(text, "nothing learned", why, keeps=self._wanted.too_long == "cut")
                continue
            self._cut += length > max_tokens
            yield document, encoded

    def _check_weights(self, conversation: Conversation) -> None:
        odd = [
            weight
            for weight in (conversation.weight, *(message.weight for message in conversation.messages))
            if weight not in (0, 1)
        ]
        if odd and not self._wanted.weighted:
            raise DataError(
                f'has the weight {odd[0]:g}; set data.conversations.weighted and train.objective = "weighted_causal_lm"'
            )

    def _drop_conversation(
        self, text: str, reason: str, why: str, *, keeps: bool, cause: DataError | None = None
    ) -> None:
        """Count a conversation that is left out, or end with its name."""
        content = hashlib.sha256(text.encode()).digest()
        if not keeps:
            raise DataError(f"{self._find_line_names({content: why})[0]}") from cause
        self._dropped[reason] += 1
        if len(self._to_name) < _NAMED:
            self._to_name[content] = why

    def _dropped_names(self) -> list[str]:
        return self._find_line_names(self._to_name) if self._to_name else []

    def _find_line_names(self, wanted: dict[bytes, str]) -> list[str]:
        """Find the lines of conversations by reading the sources again: names are not kept of all of them."""
        matches: dict[bytes, str] = {}
        for source in self._sources:
            for document in source.documents():
                content = hashlib.sha256(clean_text(document)).digest()
                if content in wanted and content not in matches:
                    matches[content] = f"{document.name}: {wanted[content]}"
                    if len(matches) == len(wanted):
                        return list(matches.values())
        return list(matches.values()) or [f"data.conversations: {_CHANGED}"]

    def _check_splits(self, train: ChatSplitRecord, held_out: ChatSplitRecord) -> None:
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(self._dropped.items()))
        suffix = f" ({left_out})" if left_out else ""
        if not train.conversations:
            raise DataError(f"data.conversations: no training conversation is left{suffix}; add some").with_facts(
                code="PHX-I012"
            )
        if self._config.validation_share > 0 and not held_out.conversations:
            do = "raise data.validation_share, or add conversations"
            raise DataError(f"data.conversations: no held-out conversation{suffix}; {do}").with_facts(
                code="PHX-I012", do=do
            )


def _find_template(config: DataConfig, wanted: ConversationsConfig, job: ChatJob) -> ChatTemplate:
    if isinstance(config.tokenizer, BpeConfig):
        directory, end_token = None, ByteBpeTraining(vocab_size=config.tokenizer.vocab_size).end_of_text
    else:
        path = locate_tokenizer(config.tokenizer, job.tokenizer_path)
        directory = path.parent
        tokenizer = load_tokenizer(config.tokenizer, job.tokenizer_path)
        end_token = tokenizer.backend.id_to_token(tokenizer.eos_id) or ""
    if wanted.template == OF_MODEL:
        template = None if directory is None else model_template(directory)
        return template or default_template("chatml", end_token)
    if wanted.template in DEFAULT_TEMPLATES:
        return default_template(wanted.template, end_token)
    return template_from_file(Path(wanted.template), directory, end_token)
