"""Texts that the trained model writes, for a person to see the progress."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from phalanx.data import Corpus
from phalanx.data.borders import first_ids_of
from phalanx.data.preferences import PairCorpus
from phalanx.errors import ConfigError
from phalanx.models import StageModule
from phalanx.train.config import RunConfig
from phalanx.train.train_section import SamplesConfig

_MAX_CHARACTERS = 4000


@dataclass(frozen=True)
class TextSample:
    """One text of the model."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Continuation:
    """The rule by which a text is continued.

    Attributes:
        context: Number of last tokens that the next one depends on.
        vocab_size: Tokens that there are a text for; the model may have more.
        temperature: Temperature of the draw; 0 takes the likeliest token.
    """

    tokens: int
    context: int
    vocab_size: int
    eos_id: int
    temperature: float = 0.0
    seed: int = 0


@torch.no_grad()
def continue_prompt(stages: Sequence[StageModule], prompt: Sequence[int], rule: Continuation) -> list[int]:
    """Return the tokens that follow a prompt.

    The whole context goes through all stages for every token: slow, and without a second way to run a stage.

    Args:
        prompt: Token ids, at least one.

    Returns:
        At most so many tokens as the rule says; fewer where the end of text comes, or a logit is no finite number.
    """
    were_training = [stage.training for stage in stages]
    draw = torch.Generator().manual_seed(rule.seed)
    ids = list(prompt)
    try:
        for stage in stages:
            stage.eval()
        while len(ids) < len(prompt) + rule.tokens:
            token = _next_token(_next_logits(stages, ids[-rule.context :])[: rule.vocab_size], rule.temperature, draw)
            if token is None or token == rule.eos_id:
                break
            ids.append(token)
    finally:
        for stage, was_training in zip(stages, were_training, strict=True):
            stage.train(was_training)
    return ids[len(prompt) :]


def _next_logits(stages: Sequence[StageModule], ids: Sequence[int]) -> Tensor:
    """The logits of the token after these, ``[vocabulary]``."""
    x = torch.tensor([ids], dtype=torch.int64)
    for stage in stages:
        x = stage(x.to(next(stage.parameters()).device))
    return x[0, -1].to("cpu", torch.float32)


def _next_token(logits: Tensor, temperature: float, draw: torch.Generator) -> int | None:
    if not bool(torch.isfinite(logits).all()):
        return None
    if temperature == 0.0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=draw))


class TextSampler:
    """A sampler that has the model continue the prompts of a run file."""

    def __init__(self, config: SamplesConfig, tokenizer: Path, rule: Continuation) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(tokenizer))
        self._rule = rule
        first = first_ids_of(self._backend)
        bare = {text: self._backend.encode(text, add_special_tokens=False).ids for text in config.prompts}
        self._prompts = {text: [*first, *ids] for text, ids in bare.items()}
        for text, ids in bare.items():
            if not ids:
                raise ConfigError(f"train.samples.prompts: {text[:40]!r} has no token; give at least a word")

    @classmethod
    def from_run(cls, run: RunConfig, corpus: Corpus | PairCorpus) -> "TextSampler | None":
        """Return the sampler that a run file asks for; None where it asks for none."""
        config = run.train.samples
        if config is None:
            return None
        sizes = (config.tokens, run.data.sequence_length, corpus.vocab_size, corpus.eos_id)
        return cls(config, corpus.tokenizer_path, Continuation(*sizes, config.temperature, run.train.seed))

    def write_samples(self, stages: Sequence[StageModule]) -> list[TextSample]:
        """Continue every prompt; the same model and rule write the same texts."""
        continuations = [(text, continue_prompt(stages, ids, self._rule)) for text, ids in self._prompts.items()]
        return [TextSample(text, self._backend.decode(ids)[:_MAX_CHARACTERS]) for text, ids in continuations]
