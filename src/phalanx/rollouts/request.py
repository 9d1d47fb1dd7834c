"""The request to a worker: prompts, the rule of the draw, a seed, and the digest of the weights."""

from typing import Annotated

from pydantic import Field

from phalanx.config import StrictModel, canonical_json
from phalanx.pipeline.protocol.message import Digest, Step
from phalanx.rollouts.verdict import RolloutTolerance
from phalanx.security.crypto import digest_hex
from phalanx.transport import Body

MAX_PROMPTS = 2**12
"""Of one request; all of them have to fit into a frame's header."""
MAX_SAMPLES = 2**12
MAX_TOKENS = 2**20
"""Of one prompt or one sampled text."""

TokenId = Annotated[int, Field(ge=0, lt=2**24)]
PromptNumber = Annotated[int, Field(ge=0, lt=2**40)]
SampleNumber = Annotated[int, Field(ge=0, lt=MAX_SAMPLES)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class SamplerConfig(StrictModel):
    """The rule of the draw; with a seed it leaves a worker no choice.

    Attributes:
        max_new_tokens: A text without an end has exactly so many.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw from so many likeliest tokens; 0 for all.
        top_p: Draw from the likeliest tokens that have this share together.
        sketch_every: A commitment to the last hidden state every so many tokens, at the first one to begin with.
    """

    max_new_tokens: int = Field(default=128, ge=1, le=MAX_TOKENS)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_k: int = Field(default=0, ge=0, le=2**24)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    sketch_every: int = Field(default=16, ge=1, le=MAX_TOKENS)

    @property
    def logit_divisor(self) -> float:
        """Divisor of the logits; a greedy draw reports log-probabilities at temperature 1."""
        return self.temperature or 1.0

    def num_sketches(self, tokens: int) -> int:
        """Commitments to hidden states in a text of so many tokens."""
        return -(-tokens // self.sketch_every)


class Prompt(StrictModel):
    """A prompt, by its number in the step; the number enters every draw."""

    number: PromptNumber
    ids: tuple[TokenId, ...] = Field(min_length=1, max_length=MAX_TOKENS)


class RolloutRequest(Body, kind="rollout_request"):
    """A request of the owner: texts for these prompts, by these weights and this rule.

    Attributes:
        step: The optimizer step that will train on them; enters every draw.
        policy: Digest of the weights, by `policy_digest`.
        seed: Seed of the run; enters every draw.
        prompts: Prompts in rising order of their numbers.
        samples: Texts for each prompt, numbered from 0.
        order: Number of the request among all that its owner sends in a session, so that no two have one digest.
        tolerance: Tolerance of the judgement; a worker that answers has agreed to it.
    """

    step: Step
    policy: Digest
    seed: Seed
    sampler: SamplerConfig
    prompts: tuple[Prompt, ...] = Field(min_length=1, max_length=MAX_PROMPTS)
    samples: int = Field(ge=1, le=MAX_SAMPLES)
    ends: tuple[TokenId, ...] = Field(default=(), max_length=64)
    order: int = Field(default=0, ge=0, lt=2**63)
    tolerance: RolloutTolerance = RolloutTolerance()

    # nothing is cached: a copy with other prompts would keep it
    @property
    def request_digest(self) -> str:
        """BLAKE3 over the canonical JSON: names this one request and all that it says."""
        return digest_hex(canonical_json(self.model_dump(mode="json")))

    @property
    def text_places(self) -> tuple[tuple[int, int], ...]:
        """Number of the prompt and of the sample of every text, in the order of an answer."""
        return tuple((prompt.number, sample) for prompt in self.prompts for sample in range(self.samples))

    @property
    def prompt_ids(self) -> dict[int, tuple[int, ...]]:
        """Tokens of each prompt, by its number."""
        return {prompt.number: prompt.ids for prompt in self.prompts}
