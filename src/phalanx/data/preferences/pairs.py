"""Preferences as the loader and the loop know sequences: two rows a pair, neighbours in every microbatch."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from phalanx.data.batch import IGNORE, Batch
from phalanx.data.chat.settings import PreferencesConfig
from phalanx.data.chat.template import TEMPLATE_FILE
from phalanx.data.config import BpeConfig, DataConfig
from phalanx.data.preferences.encoder import AnswerEncoder, EncodedAnswer, PreferenceFiles
from phalanx.data.preferences.preference import Preference
from phalanx.data.publish import publish_file
from phalanx.data.sources.listing import is_empty
from phalanx.data.tokenizers.tokenizer import (
    TOKENIZER_FILE,
    TextTokenizer,
    load_tokenizer,
    locate_tokenizer,
    vocabulary_digest,
)
from phalanx.data.tokenizers.training import train_bpe
from phalanx.errors import ConfigError, DataError

MARGIN, WANTED = "margin", "wanted"
_DRAW_BITS = 32

Say = Callable[[str], None]


@dataclass(frozen=True)
class PairRows:
    """Pairs as tensors; pair k is rows 2k and 2k + 1.

    Attributes:
        ids: int64 ``[2 pairs, tokens]``, padded behind.
        labels: The same shape, already shifted; IGNORE outside the answers.
        extras: Further rows by name, ``[2 pairs]``.
    """

    ids: Tensor
    labels: Tensor
    extras: Mapping[str, Tensor]

    @property
    def num_pairs(self) -> int:
        """How many there are."""
        return len(self.ids) // 2

    def pair_batch(self, indices: Sequence[int]) -> Batch:
        """Pairs by number: two rows each."""
        for index in indices:
            if not 0 <= index < self.num_pairs:
                raise DataError(f"pair {index} is out of range; expected 0 to {self.num_pairs - 1}")
        return self._rows_batch([2 * index + side for index in indices for side in (0, 1)])

    def _rows_batch(self, rows: list[int]) -> Batch:
        chosen = torch.tensor(rows, dtype=torch.int64)
        extras = {name: column[chosen] for name, column in self.extras.items()}
        return Batch(self.ids[chosen], self.labels[chosen], tuple(rows), extras)

    def rows_between(self, start: int, stop: int) -> Batch:
        """Rows by number without the padding that all of them have."""
        return trim_padding(self._rows_batch(list(range(start, stop))))

    def with_extras(self, more: Mapping[str, Tensor], read: Sequence[str]) -> "PairRows":
        """Return the same rows with further columns, of which those are kept that an objective reads."""
        all_extras = {**self.extras, **more}
        return replace(self, extras={name: all_extras[name] for name in read if name in all_extras})

    def select_pairs(self, indices: Sequence[int]) -> "PairRows":
        """Return pairs by number as a table of their own."""
        rows = torch.tensor([2 * index + side for index in indices for side in (0, 1)], dtype=torch.int64)
        return PairRows(self.ids[rows], self.labels[rows], {name: column[rows] for name, column in self.extras.items()})

    def rows_digest(self) -> str:
        """SHA-256 in hex over ids, labels and further columns."""
        total = hashlib.sha256(repr(tuple(self.ids.shape)).encode())
        for name, tensor in (("ids", self.ids), ("labels", self.labels), *sorted(self.extras.items())):
            total.update(name.encode())
            total.update(tensor.contiguous().numpy().tobytes())
        return total.hexdigest()


def trim_padding(batch: Batch) -> Batch:
    """Return a batch without the columns behind its longest answer, which no row before them sees."""
    columns = torch.arange(1, batch.labels.shape[1] + 1)
    # the token behind the last label is a row's own
    stop = int((columns * (batch.labels != IGNORE)).max()) + 1
    return replace(batch, input_ids=batch.input_ids[:, :stop], labels=batch.labels[:, :stop])


@dataclass(frozen=True)
class PairCorpus:
    """The pairs of a run, to be drawn from by a loader: a number is a pair.

    Attributes:
        tokenizer_path: Its ``tokenizer.json``.
        vocabulary_digest: SHA-256 in hex over what decides the ids of a text.
        template: The chat template that prompts were written by; None where they are texts.
        end_of_turn: The token that ends an answer by it.
    """

    train: PairRows
    held_out: PairRows
    vocab_size: int
    eos_id: int
    tokenizer_path: Path
    vocabulary_digest: str
    template: Path | None = None
    end_of_turn: int | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex of every row, log-probabilities of a reference included where there are any."""
        parts = (self.train.rows_digest(), self.held_out.rows_digest(), self.vocabulary_digest)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def share_of(self, number: int, shares: int) -> "PairCorpus":
        """Return every so manyth pair, of both halves: shares of different numbers have no pair in common."""
        train, held_out = (
            half.select_pairs(range(number, half.num_pairs, shares)) for half in (self.train, self.held_out)
        )
        if not train.num_pairs:
            raise ConfigError(
                f"data: {self.train.num_pairs} training pairs cannot be divided among {shares}; add pairs"
            )
        return replace(self, train=train, held_out=held_out)

    def without_training(self) -> "PairCorpus":
        """Return the held-out pairs alone."""
        return replace(self, train=self.train.select_pairs(()))

    @property
    def num_train_sequences(self) -> int:
        """Pairs that are trained on."""
        return self.train.num_pairs

    @property
    def num_validation_sequences(self) -> int:
        """Pairs that are held out."""
        return self.held_out.num_pairs

    def train_batch(self, indices: Sequence[int]) -> Batch:
        """Pairs by number, two rows each."""
        return self.train.pair_batch(indices)

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """Held-out pairs by number, two rows each."""
        return self.held_out.pair_batch(indices)


def prepare_preferences(
    data: DataConfig, cache_dir: Path, seed: int, tokenizer_path: Path | None, say: Say, *, single: bool = False
) -> PairCorpus:
    """Read and encode the preferences of a run.

    Args:
        data: Needs the section `preferences`.
        tokenizer_path: The model's own, for a tokenizer of kind "model".
        single: Pairs are an example and its companion, the same prompt with another example's answer; a pair of answers
            is two examples, one that is wanted and one that is not. Otherwise pairs are answers to one prompt.

    Raises:
        DataError: A line is broken or too long where the run file refuses such, or too few are left.
        ConfigError: A tokenizer of kind "model" and no model directory; or single answers where pairs are learned.
    """
    config = data.preferences
    if config is None:
        raise DataError("data.preferences: missing; add it with the files")
    entries = _read_preferences(data, config, say)
    if not single and any(example.wanted is not None for _, example in entries):
        raise ConfigError(
            'data.preferences: shape = "labelled" has single answers, which need train.objective = "kto"; give pairs'
        )
    tokenizer, path = _obtain_tokenizer(data, entries, cache_dir, tokenizer_path)
    if single:
        entries = [(name, example) for name, preference in entries for example in _single_examples(preference)]
    if tokenizer.beginning_tokens and any(not example.messages for _, example in entries):
        say(f"data: prompts of text begin with {tokenizer.beginning_tokens}, as the tokenizer's texts do")
    with AnswerEncoder(config.template, tokenizer, path, data.sequence_length) as encoder:
        encode = _encode_with_companions if single else _encode_pairs
        pairs_kept, cuts = _select_fitting(entries, encode(entries, encoder, seed), config)
        template, end_of_turn = _kept_template(encoder, cache_dir)
    if dropped := len(entries) - len(pairs_kept):
        say(f"data: {dropped} of {len(entries)} preferences have a side of over {data.sequence_length} tokens: dropped")
    if cuts:
        say(
            f"WARNING: data.preferences: {len(cuts)} of {len(entries)} preferences have a side of over "
            f"{data.sequence_length} tokens: their prompts lack up to {max(cuts)} tokens of their beginning, their "
            'answers none; raise data.sequence_length, or set data.preferences.too_long = "refuse" or "drop"'
        )
    out_flags = [_is_held_out(preference, seed, data.validation_share) for preference, _ in pairs_kept]
    parts = [
        [pair for (_, pair), out in zip(pairs_kept, out_flags, strict=True) if out == is_held]
        for is_held in (False, True)
    ]
    max_pairs = data.max_validation_sequences
    parts[1] = (
        [parts[1][index * len(parts[1]) // max_pairs] for index in range(max_pairs)]
        if len(parts[1]) > max_pairs
        else parts[1]
    )
    if not parts[0] or (data.validation_share and not parts[1]):
        raise DataError(
            f"data.preferences: {len(parts[0])} pairs are left for training and {len(parts[1])} held out; add more, "
            "or change data.validation_share"
        )
    rows = [_pairs_to_rows(part, data.sequence_length, tokenizer.eos_id) for part in parts]
    train, held_out = rows
    vocabulary = vocabulary_digest(tokenizer)
    return PairCorpus(train, held_out, tokenizer.vocab_size, tokenizer.eos_id, path, vocabulary, template, end_of_turn)


@dataclass(frozen=True)
class EncodedPair:
    """Two rows.

    Attributes:
        wanted: Whether the first is wanted.
        is_companioned: Whether the second is another example's answer, which may be cut off.
    """

    sides: tuple[EncodedAnswer, EncodedAnswer]
    margin: float = 0.0
    wanted: bool = True
    is_companioned: bool = False

    def fit_to(self, tokens: int, *, may_cut: bool) -> tuple["EncodedPair | None", int]:
        """Return the pair in rows of so many tokens, or None; and how many tokens of the prompt that took.

        Args:
            may_cut: Both sides may lose the same number of tokens of their prompt's beginning.
        """
        whole_sides = self.sides[:1] if self.is_companioned else self.sides
        excess = max(len(side.ids) for side in whole_sides) - tokens
        if excess > (min(side.num_spare for side in whole_sides) if may_cut else 0):
            return None, 0
        first, second = (side.shorten_prompt(excess) if excess > 0 else side for side in self.sides)
        return replace(self, sides=(first, second.cut_tokens(tokens) if self.is_companioned else second)), max(
            excess, 0
        )


def _read_preferences(data: DataConfig, wanted: PreferencesConfig, say: Say) -> list[tuple[str, Preference]]:
    unique: dict[str, tuple[str, Preference]] = {}
    for number, source in enumerate(wanted.sources):
        files = PreferenceFiles(source, wanted.broken)
        for name, preference in files.read_preferences():
            unique.setdefault(preference.model_dump_json(), (name, preference))
            if len(unique) == data.max_documents:
                break
        if files.num_dropped:
            say(f"data.preferences.sources.{number}: {files.num_dropped} lines are not preferences: dropped")
        if len(unique) == data.max_documents:
            break
    if not unique:
        paths, do = [source.path for source in wanted.sources], "give it another path"
        state = "is empty" if all(map(is_empty, paths)) else "has no preference"
        raise DataError(f"data.preferences: {', '.join(map(str, paths))}: {state}; {do}").with_facts(
            code="PHX-I012", file=str(paths[0]), key="data.preferences", found=state, expected="preferences", do=do
        )
    return list(unique.values())


def _obtain_tokenizer(
    data: DataConfig, preferences: Sequence[tuple[str, Preference]], cache_dir: Path, tokenizer_path: Path | None
) -> tuple[TextTokenizer, Path]:
    if not isinstance(data.tokenizer, BpeConfig):
        return load_tokenizer(data.tokenizer, tokenizer_path), locate_tokenizer(data.tokenizer, tokenizer_path)
    texts = [text for _, preference in preferences for text in _preference_texts(preference)]
    tokenizer = train_bpe(iter([text for text in texts if text]), data.tokenizer)
    content = tokenizer.to_json()
    path = cache_dir / f"vocabulary-{hashlib.sha256(content).hexdigest()[:32]}" / TOKENIZER_FILE
    publish_file(path, content)
    return tokenizer, path


def _preference_texts(one: Preference) -> Iterator[str]:
    messages = [*one.messages, *(message for answer in one.answers for message in answer.messages)]
    yield from (one.text, *(message.text_content for message in messages), *(answer.text for answer in one.answers))


def _kept_template(encoder: AnswerEncoder, cache_dir: Path) -> tuple[Path | None, int | None]:
    """Return the template of conversations as a file, so that exports are talked to as they were trained."""
    if encoder.chat_encoder is None:
        return None, None
    content = encoder.chat_encoder.chat_template.source.encode()
    path = cache_dir / f"template-{hashlib.sha256(content).hexdigest()[:32]}" / TEMPLATE_FILE
    publish_file(path, content)
    return path, encoder.chat_encoder.end_of_turn


def _single_examples(one: Preference) -> list[Preference]:
    if one.wanted is not None:
        return [one]
    return [
        one.model_copy(update={"answers": (answer,), "wanted": is_wanted})
        for answer, is_wanted in zip(one.answers, (True, False), strict=True)
    ]


def _encode_pairs(
    preferences: Sequence[tuple[str, Preference]], encoder: AnswerEncoder, seed: int
) -> list[EncodedPair]:
    del seed
    return [
        EncodedPair(
            (
                encoder.encode_with_prompt(name, preference, preference.answers[0]),
                encoder.encode_with_prompt(name, preference, preference.answers[1]),
            ),
            preference.margin,
        )
        for name, preference in preferences
    ]


def _encode_with_companions(
    preferences: Sequence[tuple[str, Preference]], encoder: AnswerEncoder, seed: int
) -> list[EncodedPair]:
    """Each example with its companion: the answer of the next one in an order that the seed decides."""
    order = torch.randperm(len(preferences), generator=torch.Generator().manual_seed(seed)).tolist()
    following = dict(zip(order, [*order[1:], *order[:1]], strict=True))
    pairs = []
    for number, (name, preference) in enumerate(preferences):
        first_answer = encoder.encode_with_prompt(name, preference, preference.answers[0])
        other = encoder.encode_with_prompt(name, preference, preferences[following[number]][1].answers[0])
        pairs.append(EncodedPair((first_answer, other), wanted=bool(preference.wanted), is_companioned=True))
    return pairs


def _select_fitting(
    preferences: Sequence[tuple[str, Preference]], pairs: Sequence[EncodedPair], wanted: PreferencesConfig
) -> tuple[list[tuple[Preference, EncodedPair]], list[int]]:
    """Return the pairs that fit, and for each that was cut the number of tokens that its prompt lost."""
    encoded_pairs, cuts = [], []
    for (name, preference), pair in zip(preferences, pairs, strict=True):
        tokens = pair.sides[0].max_tokens
        fitted, excess = pair.fit_to(tokens, may_cut=wanted.too_long == "cut")
        if fitted is not None:
            encoded_pairs.append((preference, fitted))
            cuts += [excess] if excess else []
        elif wanted.too_long != "drop":
            longest = max(len(side.ids) for side in pair.sides[: 1 if pair.is_companioned else 2])
            why = ", and a cut of the prompt does not suffice" if wanted.too_long == "cut" else ""
            raise DataError(
                f"{name}: prompt and answer have {longest} tokens, more than data.sequence_length = {tokens}{why}; "
                'raise it, or set data.preferences.too_long = "drop"'
            ).with_facts(
                file=name,
                key="data.sequence_length",
                found=f"{longest} tokens",
                expected=f"at most {tokens}",
                do='raise data.sequence_length, or set data.preferences.too_long = "drop"',
            )
    return encoded_pairs, cuts


def _is_held_out(one: Preference, seed: int, share: float) -> bool:
    """Draw by prompt, so that none is on both sides."""
    drawn = hashlib.sha256(f"{seed} {one.prompt_key}".encode()).digest()[: _DRAW_BITS // 8]
    return bool(int.from_bytes(drawn, "big") < share * (1 << _DRAW_BITS))


def _pairs_to_rows(pairs: Sequence[EncodedPair], tokens: int, pad: int) -> PairRows:
    ids = torch.full((2 * len(pairs), tokens), pad, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORE)
    for number, pair in enumerate(pairs):
        for side, answer in enumerate(pair.sides):
            ids[2 * number + side, : len(answer.ids)] = torch.tensor(answer.ids, dtype=torch.int64)
            labels[2 * number + side, : len(answer.ids)] = torch.tensor(answer.labels, dtype=torch.int64)
    margin = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32).repeat_interleave(2)
    is_wanted = torch.tensor([int(pair.wanted) for pair in pairs], dtype=torch.int64).repeat_interleave(2)
    return PairRows(ids, labels, {MARGIN: margin, WANTED: is_wanted})
