"""The plan for a time budget on this machine: size of the model and its vocabulary, and length of each phase."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.errors import ConfigError
from phalanx.laptop.texts import CutTexts
from phalanx.laptop.vocabulary import Vocabulary

Phase = Literal["tokenizer", "pretrain", "chat", "preferences", "evaluate", "report"]
PHASES: tuple[Phase, ...] = ("tokenizer", "pretrain", "chat", "preferences", "evaluate", "report")
TRAINED: tuple[Phase, ...] = ("pretrain", "chat", "preferences")
_SHARES: Mapping[Phase, float] = {"pretrain": 0.72, "chat": 0.18, "preferences": 0.10}
"""Of the time that is left for training: three parts of four before chats, as in the CPU run of nanochat."""
START_S = 6.0
"""Of a phase that trains: keys, preparation of its rows, first and last checkpoint, export."""
_MIN_TRAINING_S = 15.0
MAX_PASSES = 16
"""Passes over the same text bring next to nothing from here on (Muennighoff et al. 2023, arXiv 2305.16264)."""
_TOKENS_PER_PARAMETER = 20
MICROBATCH_TOKENS = 2048
_STEPS = 600
"""So many steps are aimed at: with fewer, larger batches a small model learns less from the same tokens."""
_MAX_BATCH_TOKENS = 16384
_FORWARD_SHARE = 1 / 3
_DPO_ROWS, _ROW_SHARE = 16, 0.5
"""Rows of a step, and tokens of a row that are no padding, as share of its length."""
_MIN_PAIRS = 40
HELD_OUT_ROWS = 0.1
"""Share of chats and pairs that is held out; in their run files as well."""
_CHAT_PASSES = 3
_VALIDATIONS = 4
_MIN_STEPS, _MAX_HELD_ROWS = 8, 64
_TOLERANCE = 1.1
"""A plan may be longer than the time by so much: the shortest phases cannot be cut further."""
_TOKENIZER_BYTES_PER_S = 1e6
_VOCABULARIES = ((200_000, 512), (1_000_000, 1024), (10_000_000, 2048), (50_000_000, 4096))
_MAX_VOCABULARY = 8192


class LaptopShape(StrictModel):
    """The size of a model of the family llama.

    Attributes:
        tokens: Its window, and the length of the sequences of all phases.
        lr: Learning rate of pre-training; chats are learned with a third of it, preferences with a twentieth.
    """

    layers: int = Field(ge=1)
    hidden: int = Field(ge=8)
    heads: int = Field(ge=1)
    tokens: int = Field(ge=64)
    lr: float = Field(gt=0.0)

    @property
    def inner(self) -> int:
        """Width of the feed-forward layers: 8/3 of the model's, rounded up to a multiple of 16."""
        return 16 * math.ceil(self.hidden * 8 / 3 / 16)

    def num_parameters(self, vocab_size: int) -> int:
        """Count the parameters, with one matrix for embedding and head."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.inner + 2 * self.hidden
        return vocab_size * self.hidden + self.layers * block + self.hidden


SHAPES: tuple[LaptopShape, ...] = (
    LaptopShape(layers=2, hidden=64, heads=2, tokens=256, lr=5e-3),
    LaptopShape(layers=3, hidden=96, heads=3, tokens=256, lr=4e-3),
    LaptopShape(layers=4, hidden=128, heads=4, tokens=256, lr=3e-3),
    LaptopShape(layers=4, hidden=192, heads=6, tokens=256, lr=2e-3),
    LaptopShape(layers=6, hidden=256, heads=8, tokens=256, lr=2e-3),
    LaptopShape(layers=6, hidden=384, heads=6, tokens=512, lr=1e-3),
    LaptopShape(layers=8, hidden=512, heads=8, tokens=512, lr=1e-3),
    LaptopShape(layers=12, hidden=768, heads=12, tokens=512, lr=6e-4),
)
"""The sizes that a plan chooses from, the smallest first."""


class TrainingSteps(StrictModel):
    """Length of one phase that trains.

    Attributes:
        batch: Number of rows in each step.
        max_documents: Conversations or pairs that are read; None reads all.
        held_rows: Held-out rows that each validation reads at most.
        seconds: Estimated time of the whole phase, validations included.
    """

    steps: int = Field(ge=1)
    batch: int = Field(ge=1)
    microbatches: int = Field(ge=1)
    max_documents: int | None = Field(default=None, ge=1)
    held_rows: int = Field(ge=1)
    seconds: float = Field(ge=0.0)

    @property
    def often(self) -> int:
        """Steps between validations, and between checkpoints."""
        return max(1, self.steps // _VALIDATIONS)


class LaptopRequest(StrictModel):
    """The user's request; a later start compares it with its own.

    Attributes:
        texts: SHA-256 over the documents.
        data_sft: Absolute path of conversations; None for those made of the texts.
        data_preferences: Absolute path of preferences; None for those made of the texts.
    """

    texts: str
    minutes: float = Field(gt=0.0, le=60 * 24 * 30, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0)
    data_sft: str | None = None
    data_preferences: str | None = None


class LaptopPlan(StrictModel):
    """All that is settled before the first phase; kept as ``plan.toml``.

    Attributes:
        seconds_per_token: Measured cost of training with the chosen shape.
        predicted: Loss in nats by `predict_loss`; it ranks shapes and promises nothing.
        is_limited_by_text: Whether the text, and not the time, ends pre-training.
    """

    question: LaptopRequest
    shape: LaptopShape
    vocab_size: int = Field(ge=260)
    threads: int = Field(ge=1)
    train_bytes: int = Field(ge=1)
    held_out_bytes: int = Field(ge=1)
    seconds_per_token: float = Field(gt=0.0)
    predicted: float
    is_limited_by_text: bool
    tokenizer_s: float
    evaluate_s: float
    pretrain: TrainingSteps
    chat: TrainingSteps
    preferences: TrainingSteps

    @property
    def num_parameters(self) -> int:
        """Count the parameters of the model."""
        return self.shape.num_parameters(self.vocab_size)

    @property
    def estimates_s(self) -> dict[Phase, float]:
        """Seconds that each phase is expected to take."""
        trained = {"pretrain": self.pretrain, "chat": self.chat, "preferences": self.preferences}
        others = {"tokenizer": self.tokenizer_s, "evaluate": self.evaluate_s, "report": 2.0}
        return {phase: trained[phase].seconds if phase in trained else others[phase] for phase in PHASES}


@dataclass(frozen=True)
class RowCounts:
    """Rows that the phases after pre-training learn from, held-out ones included, and bytes of the chats."""

    chats: int
    chat_bytes: int
    preferences: int


@dataclass(frozen=True)
class PlanGrounds:
    """The input of a plan, beside the speed of each shape."""

    question: LaptopRequest
    texts: CutTexts
    rows: RowCounts
    vocabulary: Vocabulary
    threads: int


def choose_vocabulary(num_bytes: int) -> int:
    """Return the number of tokens that suits so much text; text with few words supports fewer."""
    return next((size for limit, size in _VOCABULARIES if num_bytes < limit), _MAX_VOCABULARY)


def predict_loss(num_parameters: int, unique_tokens: float, seen_tokens: float) -> float:
    """Return the loss by the law of Hoffmann et al. 2022, in the form of Muennighoff et al. 2023 for repeated text.

    Repeated tokens are worth less and less, and so are parameters for which the text has too few different tokens.
    The law was fitted to far larger models on other text: it ranks shapes here, and says nothing about a run's loss.
    """
    suiting = unique_tokens / _TOKENS_PER_PARAMETER
    parameters = _worth(num_parameters, suiting, 5.31)
    tokens = _worth(seen_tokens, unique_tokens, 15.39)
    return float(1.69 + 406.4 / max(1.0, parameters) ** 0.34 + 410.7 / max(1.0, tokens) ** 0.28)


def _worth(amount: float, full: float, decay: float) -> float:
    """Return the worth of an amount: beyond `full` each further part is worth less, by an exponential."""
    beyond = max(0.0, amount / full - 1)
    return min(amount, full) + full * decay * (1 - math.exp(-beyond / decay))


def make_plan(grounds: PlanGrounds, costs: Mapping[LaptopShape, float]) -> LaptopPlan:
    """Choose the shape and the steps.

    Args:
        costs: Seconds a token of forward, backward and optimizer, by shape, as they were measured on this machine.

    Raises:
        ConfigError: The time is too short for anything, or there are too few rows.
    """
    _check_rows(grounds.rows)
    plans = [_plan_shape(shape, cost, grounds) for shape, cost in costs.items()]
    fitting = [plan for plan in plans if plan is not None]
    if not fitting:
        minutes, num_bytes = grounds.question.minutes, grounds.texts.num_bytes
        raise ConfigError(
            f"--minutes {minutes:g}: too short on this machine for texts of {num_bytes:,} bytes; give more time, or "
            "less text"
        ).with_facts(key="--minutes", found=f"{minutes:g}", do="give more time, or less text")
    return min(fitting, key=lambda plan: plan.predicted)


def _plan_shape(shape: LaptopShape, cost: float, grounds: PlanGrounds) -> LaptopPlan | None:
    """Plan with one shape; None where its shortest phases take longer than there is time."""
    question, vocabulary, texts = grounds.question, grounds.vocabulary, grounds.texts
    text_tokens = vocabulary.count_tokens(texts.train_bytes)
    held_tokens = vocabulary.count_tokens(texts.held_out_bytes)
    tokenizer_s = 1.0 + texts.train_bytes / _TOKENIZER_BYTES_PER_S
    evaluate_s = 5.0 + len(TRAINED) * held_tokens * cost * _FORWARD_SHARE
    left_s = question.minutes * 60 - tokenizer_s - evaluate_s - len(TRAINED) * START_S
    if left_s < _MIN_TRAINING_S:
        return None
    enough = MAX_PASSES * text_tokens
    pretrain = _plan_steps(left_s * _SHARES["pretrain"], enough, shape, cost, held_tokens)
    # packed rows are not quite full
    chat_tokens = 1.3 * _CHAT_PASSES * vocabulary.count_tokens(grounds.rows.chat_bytes)
    chat = _plan_steps(left_s * _SHARES["chat"], chat_tokens, shape, cost, chat_tokens * HELD_OUT_ROWS)
    seen = pretrain.steps * pretrain.batch * shape.tokens
    plan = LaptopPlan(
        question=question,
        shape=shape,
        vocab_size=vocabulary.size,
        threads=grounds.threads,
        train_bytes=texts.train_bytes,
        held_out_bytes=texts.held_out_bytes,
        seconds_per_token=cost,
        predicted=predict_loss(shape.num_parameters(vocabulary.size), text_tokens, seen),
        is_limited_by_text=left_s * _SHARES["pretrain"] / cost > 1.2 * enough,
        tokenizer_s=tokenizer_s,
        evaluate_s=evaluate_s,
        pretrain=pretrain,
        chat=chat,
        preferences=_plan_pairs(left_s * _SHARES["preferences"], shape, cost, grounds.rows.preferences),
    )
    return plan if sum(plan.estimates_s.values()) <= question.minutes * 60 * _TOLERANCE else None


def _check_rows(rows: RowCounts) -> None:
    for option, number, least in (("--data-sft", rows.chats, 20), ("--data-preferences", rows.preferences, _MIN_PAIRS)):
        if number < least:
            raise ConfigError(
                f"{option}: {number} rows, but a part is held out and the rest is learned from; at least {least} are "
                "needed. Of texts with short paragraphs few can be made: give a file with this option"
            ).with_facts(key=option, found=f"{number} rows", expected=f"at least {least}")


def _plan_steps(left_s: float, enough: float, shape: LaptopShape, cost: float, held_tokens: float) -> TrainingSteps:
    """Divide the tokens that there is time for, at most `enough`, into about `_STEPS` steps."""
    # validations take a tenth of the time at most
    held_rows = max(2, int(min(held_tokens, _MAX_HELD_ROWS * shape.tokens, left_s / 10 / _pass_s(cost)) / shape.tokens))
    validating_s = held_rows * shape.tokens * _pass_s(cost)
    seen = min(enough, max(0.0, left_s - validating_s) / cost)
    rows = MICROBATCH_TOKENS // shape.tokens
    # powers of two of microbatches; a short run needs steps more than rows, and gets halves of one
    microbatches = 2 ** max(0, round(math.log2(max(1.0, min(_MAX_BATCH_TOKENS, seen / _STEPS) / MICROBATCH_TOKENS))))
    batch = rows * microbatches if seen / _STEPS > MICROBATCH_TOKENS / 2 else max(2, rows // 2)
    steps = max(_MIN_STEPS, int(seen / (batch * shape.tokens)))
    seconds = START_S + steps * batch * shape.tokens * cost + validating_s
    return TrainingSteps(steps=steps, batch=batch, microbatches=microbatches, held_rows=held_rows, seconds=seconds)


def _plan_pairs(left_s: float, shape: LaptopShape, cost: float, num_pairs: int) -> TrainingSteps:
    """Plan one pass over as many pairs as there is time for: the reference reads both rows of each, then they train."""
    row_s = shape.tokens * _ROW_SHARE * cost
    pairs = max(_MIN_PAIRS, min(num_pairs, int(left_s / (2 * row_s * (1 + _FORWARD_SHARE)))))
    steps = max(_MIN_STEPS, int(2 * (1 - HELD_OUT_ROWS) * pairs / _DPO_ROWS))
    held_rows = max(4, 2 * int(min(48, HELD_OUT_ROWS * pairs)))
    seconds = START_S + steps * _DPO_ROWS * row_s + 2 * pairs * row_s * _FORWARD_SHARE
    seconds += held_rows * shape.tokens * _ROW_SHARE * _pass_s(cost)
    microbatches = max(1, _DPO_ROWS * shape.tokens // (2 * MICROBATCH_TOKENS))
    return TrainingSteps(
        steps=steps,
        batch=_DPO_ROWS,
        microbatches=microbatches,
        max_documents=pairs,
        held_rows=held_rows,
        seconds=seconds,
    )


def _pass_s(cost: float) -> float:
    """Seconds that all validations of a phase take for each token."""
    return (_VALIDATIONS + 1) * _FORWARD_SHARE * cost


def is_larger_worth_probing(
    costs: Mapping[LaptopShape, float], vocab_size: int, text_tokens: float, seconds: float
) -> bool:
    """Whether a further, larger shape may be better than all that were measured, the last of which was the largest."""
    losses: Sequence[float] = [
        predict_loss(shape.num_parameters(vocab_size), text_tokens, min(seconds / cost, MAX_PASSES * text_tokens))
        for shape, cost in costs.items()
    ]
    return len(losses) < 2 or losses[-1] <= min(losses[:-1])
