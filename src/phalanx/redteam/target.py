"""The attacked model, and the texts and models that the attacker has beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.data.chat import ChatMessage
from phalanx.data.sources import CanarySettings
from phalanx.errors import ModelError
from phalanx.redteam.asking import Asks
from phalanx.serve.text_model import TextModel

Need = Literal["weights", "gradients", "data", "texts", "api", "reference", "canaries", "chat"]
_MIN_TOKENS = 4


@dataclass(frozen=True)
class TextSet:
    """Token rows of one kind.

    Attributes:
        rows: Token ids of each text, at least 4 of each.
        names: Title of each text in a report.
        attributes: Part of each text that an attacker would infer; empty where no text names one.
    """

    rows: tuple[tuple[int, ...], ...] = ()
    names: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def from_texts(
        cls,
        tokenizer: Any,
        texts: Sequence[str],
        length: int,
        names: Sequence[str] = (),
        sources: Sequence[str] = (),
        attributes: Sequence[str] = (),
    ) -> "TextSet":
        """Encode texts, cut to a length; texts of fewer than 4 tokens are left out."""
        encoded = [tuple(tokenizer(text, add_special_tokens=False).input_ids[:length]) for text in texts]
        chosen = [number for number, row in enumerate(encoded) if len(row) >= _MIN_TOKENS]
        return cls(
            tuple(encoded[number] for number in chosen),
            tuple(names[number] if names else f"text {number}" for number in chosen),
            tuple(sources[number] if sources else "" for number in chosen),
            tuple(attributes[number] for number in chosen) if any(attributes) else (),
        )


@dataclass(frozen=True)
class Target:
    """A model under attack.

    Attributes:
        name: Title of the model in a report.
        model: Weights and tokenizer; None where there is an address alone.
        directory: Its directory in the hub's layout, while the attacks run.
        asks: Answers chats, over an address or by the weights; None of a model without a chat template.
        members: Texts that it was trained on.
        strangers: Texts of the same kind that it was not trained on.
        reference: A model that was not trained on the members, with the same vocabulary.
        canaries: Secrets that were planted in its training text.
        prompts: Harmless prompts from the model's purpose.
    """

    name: str
    model: TextModel | None = None
    directory: Path | None = None
    asks: Asks | None = None
    members: TextSet = TextSet()
    strangers: TextSet = TextSet()
    reference: TextModel | None = None
    canaries: CanarySettings | None = None
    prompts: tuple[str, ...] = ()
    seed: int = 0
    limits: dict[str, int] = field(default_factory=dict)

    def missing_needs(self, needs: Sequence[Need]) -> str:
        """Say what an attack needs that is not there; empty where it can run."""
        lacks = {
            "weights": self.model is None and "the weights (give a run or a directory)",
            "gradients": self.model is None and "the weights (give a run or a directory)",
            "data": not (self.members and self.strangers)
            and "training texts and texts of the same kind (--members and --strangers, or a run)",
            "texts": not self.members and "training texts (--members, or a run)",
            "api": self.model is None and "a model that tells log-probabilities",
            "reference": self.reference is None and "a reference model (--reference)",
            "canaries": self.canaries is None and "canaries in the training text ([canaries] of a data recipe)",
            "chat": self.asks is None and "a chat template, or an address that answers chats",
        }
        return "; ".join(dict.fromkeys(str(lacks[need]) for need in needs if lacks[need]))

    @property
    def text_model(self) -> TextModel:
        """The weights."""
        if self.model is None:
            raise ModelError(f"{self.name}: its weights are not there; give a run or a directory")
        return self.model

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.text_model.tokenizer.decode(list(ids), skip_special_tokens=False))


@dataclass(frozen=True)
class RowScores:
    """What a model says of one row.

    Attributes:
        log_probs: Log-probability of each token behind the first, ``[tokens - 1]``.
        means: Mean log-probability of a token drawn there.
        spreads: Standard deviation of the same.
    """

    log_probs: Tensor
    means: Tensor
    spreads: Tensor


@torch.no_grad()
def score_rows(module: Any, rows: Sequence[Sequence[int]]) -> list[RowScores]:
    """Score rows, each by itself: no figure depends on which rows stand beside it."""
    scores = []
    for row in rows:
        ids = torch.tensor([list(row)], device=module.device)
        log_probs = torch.log_softmax(module(input_ids=ids[:, :-1]).logits[0].double(), -1).cpu()
        shares = log_probs.exp()
        means = (shares * log_probs).sum(-1)
        spreads = ((shares * log_probs.square()).sum(-1) - means.square()).clamp_min(1e-12).sqrt()
        scores.append(RowScores(log_probs.gather(1, ids[0, 1:, None].cpu())[:, 0], means, spreads))
    return scores


def chat_of(prompt: str) -> tuple[ChatMessage, ...]:
    """Return a chat of one message."""
    return (ChatMessage(role="user", content=prompt),)
