"""A sampled text with what its worker commits to; packed into bytes, and read back without belief."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from phalanx.config import StrictModel
from phalanx.errors import FrameError
from phalanx.pipeline.protocol.message import Digest
from phalanx.rollouts.config import BATCH_ROWS, AttentionKernel
from phalanx.rollouts.request import MAX_TOKENS, PromptNumber, RolloutRequest, SampleNumber
from phalanx.transport import Body

SKETCH_NUMBERS = 8
"""Numbers of one commitment to a hidden state."""

MAX_ROLLOUTS = 2**13
"""Of one answer."""

_MIN_LOGPROB, _MAX_LOGPROB = -100.0, 1e-3
"""Of a drawn token: the likeliest of 2^31 has at least -22, and numbers of 53 bits put no token above it that is more
than 41 below."""

Finish = Literal["stop", "length"]
Reward = Annotated[float, Field(ge=-1e6, le=1e6)]


@dataclass(frozen=True)
class Rollout:
    """One sampled text.

    Attributes:
        prompt: Number of the prompt in its step.
        sample: Number of the text within its prompt.
        ids: Sampled tokens, the end included.
        finish: ``stop`` where the last token is an end, ``length`` where no further token was allowed.
        logprobs: Log-probability of each sampled token at the sampler's temperature, over the whole vocabulary,
            float32 ``[tokens]``.
        sketches: Commitments to last hidden states, float32 ``[num_sketches, SKETCH_NUMBERS]``.
        reward: Reward that the worker reports; None where the owner computes rewards.
        weight: How much the owner learns from it, from 0 to 1; no worker says it.
    """

    prompt: int
    sample: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish: Finish
    logprobs: NDArray[np.float32]
    sketches: NDArray[np.float32]
    reward: float | None = None
    weight: float = 1.0

    @property
    def size_bytes(self) -> int:
        """Bytes of its tokens and commitments in an answer."""
        return 4 * len(self.ids) + self.logprobs.nbytes + self.sketches.nbytes


class RolloutEntry(StrictModel):
    """An answer's entry about one text beside its numbers."""

    prompt: PromptNumber
    sample: SampleNumber
    tokens: int = Field(ge=1, le=MAX_TOKENS)
    finish: Finish
    reward: Reward | None = None


class WritingClass(StrictModel):
    """The settings by which a worker computed its texts; a control run uses them before it is accused.

    Attributes:
        batch_rows: About so many texts at a time.
    """

    attention: AttentionKernel = "sdpa"
    batch_rows: int = Field(default=BATCH_ROWS, ge=1, le=2**16)


class RolloutAnswer(Body, kind="rollout_answer"):
    """All texts of one request; the payload has their tokens, log-probabilities and sketches.

    The header that carries it is signed and names the payload's digest: from then on its worker is bound to every token
    and number, before any draw of a check.

    Attributes:
        request: Digest of the request that this answers; it is judged as an answer to that one and to no other.
        lines: One line a text, in the order of `RolloutRequest.text_places`.
    """

    request: Digest
    written_in: WritingClass = WritingClass()
    lines: tuple[RolloutEntry, ...] = Field(max_length=MAX_ROLLOUTS)


_DEFAULT_CLASS = WritingClass()


def pack_answer(
    request: RolloutRequest, rollouts: Sequence[Rollout], written_in: WritingClass = _DEFAULT_CLASS
) -> tuple[RolloutAnswer, bytes]:
    """Write texts as the body and the payload of an answer."""
    lines = tuple(
        RolloutEntry(
            prompt=rollout.prompt,
            sample=rollout.sample,
            tokens=len(rollout.ids),
            finish=rollout.finish,
            reward=rollout.reward,
        )
        for rollout in rollouts
    )
    answer = RolloutAnswer(request=request.request_digest, written_in=written_in, lines=lines)
    parts = [
        b"".join(np.asarray(rollout.ids, "<i4").tobytes() for rollout in rollouts),
        b"".join(rollout.logprobs.astype("<f4").tobytes() for rollout in rollouts),
        b"".join(rollout.sketches.astype("<f4").tobytes() for rollout in rollouts),
    ]
    return answer, b"".join(parts)


def unpack_answer(request: RolloutRequest, answer: RolloutAnswer, payload: bytes | memoryview) -> tuple[Rollout, ...]:
    """Read an answer to a request; nothing in it is believed but its form."""
    counts = [entry.tokens for entry in answer.lines]
    sketches = [request.sampler.num_sketches(count) for count in counts]
    tokens, rows = sum(counts), sum(sketches)
    expected = 4 * (2 * tokens + SKETCH_NUMBERS * rows)
    raw = memoryview(payload).cast("B")
    if raw.nbytes != expected:
        raise FrameError(f"rollouts: the payload has {raw.nbytes} bytes, its lines need {expected}")
    ids = np.frombuffer(raw[: 4 * tokens], "<i4")
    logprobs = np.frombuffer(raw[4 * tokens : 8 * tokens], "<f4").astype(np.float32)
    numbers = np.frombuffer(raw[8 * tokens :], "<f4").astype(np.float32).reshape(rows, SKETCH_NUMBERS)
    rollouts, position, row, prompts = [], 0, 0, request.prompt_ids
    for entry, count, sketch_rows in zip(answer.lines, counts, sketches, strict=True):
        if entry.prompt not in prompts:
            raise FrameError(f"rollouts: prompt {entry.prompt} was not asked for")
        rollouts.append(
            Rollout(
                prompt=entry.prompt,
                sample=entry.sample,
                prompt_ids=prompts[entry.prompt],
                ids=tuple(ids[position : position + count].tolist()),
                finish=entry.finish,
                logprobs=logprobs[position : position + count],
                sketches=numbers[row : row + sketch_rows],
                reward=entry.reward,
            )
        )
        position, row = position + count, row + sketch_rows
    return tuple(rollouts)


def describe_misfit(request: RolloutRequest, rollout: Rollout, vocab_size: int) -> str | None:
    """Say what in a text no honest worker sends, as far as that shows without weights; None where nothing does."""
    max_tokens, ends, ids = request.sampler.max_new_tokens, set(request.ends), rollout.ids
    is_over = bool(ids) and ids[-1] in ends
    numbers = (rollout.logprobs, rollout.sketches, np.asarray(rollout.reward or 0.0))
    wrong = {
        f"has {len(ids)} tokens, expected 1 to {max_tokens}": not 1 <= len(ids) <= max_tokens,
        f"has a token beyond the vocabulary of {vocab_size}": not all(0 <= token < vocab_size for token in ids),
        "goes on after a token that ends a text": any(token in ends for token in ids[:-1]),
        "says stop, and its last token ends no text": rollout.finish == "stop" and not is_over,
        f"says length after {len(ids)} of {max_tokens} tokens": rollout.finish == "length"
        and (len(ids) != max_tokens or is_over),
        "has a number that is not finite": not all(np.isfinite(array).all() for array in numbers),
        "has a log-probability that no draw gives": not all(
            _MIN_LOGPROB <= logprob <= _MAX_LOGPROB for logprob in rollout.logprobs.tolist()
        ),
    }
    return next((what for what, is_so in wrong.items() if is_so), None)
