"""Which tokens of a row see which: causal, behind a prefix, in both directions, or per document."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from phalanx.errors import ModelError

AttentionKind = Literal["causal", "prefix", "bidirectional", "documents"]
ALL_KINDS: frozenset[AttentionKind] = frozenset({"causal", "prefix", "bidirectional", "documents"})


@dataclass(frozen=True)
class AttentionPattern:
    """Which tokens a token sees beside itself.

    Attributes:
        kind: ``causal``: those before it. ``prefix``: also all of the row's prefix. ``bidirectional``: all.
            ``documents``: those before it in its own document, in which positions count from 0.
        prefix: int64 ``[batch]``, tokens of each row's prefix; for ``prefix`` alone.
        documents: int64 ``[batch, seq]``, the number of each token's document, which stand one behind the other; for
            ``documents`` alone.

    Raises:
        ModelError: What the kind needs is missing, or is of another kind.
    """

    kind: AttentionKind = "causal"
    prefix: Tensor | None = None
    documents: Tensor | None = None

    def __post_init__(self) -> None:
        given = {name for name in ("prefix", "documents") if getattr(self, name) is not None}
        wanted = {self.kind} & {"prefix", "documents"}
        if given != wanted:
            raise ModelError(
                f"attention {self.kind}: was given {sorted(given) or 'nothing'}, needs {sorted(wanted) or 'nothing'}"
            )

    def positions(self, seq: int, device: torch.device, before: int = 0) -> Tensor:
        """Return the position of each token: ``[1, seq]``, or ``[batch, seq]`` where documents begin anew."""
        whole = torch.arange(before, before + seq, device=device).unsqueeze(0)
        if self.documents is None:
            return whole
        begins = torch.ones_like(self.documents, dtype=torch.bool)
        begins[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        first = torch.where(begins, whole, torch.zeros((), dtype=whole.dtype, device=device))
        return whole - first.cummax(dim=1).values

    def check(self, batch: int, seq: int) -> None:
        """Return where the pattern is one of so many rows of so many tokens.

        Raises:
            ModelError: It has other rows or tokens, or a prefix is longer than its row.
        """
        found = self.prefix if self.documents is None else self.documents
        wanted = (batch,) if self.documents is None else (batch, seq)
        if found is None:
            return
        if found.dtype != torch.int64 or tuple(found.shape) != wanted:
            raise ModelError(f"attention {self.kind}: {found.dtype} {list(found.shape)}; expected int64 {list(wanted)}")
        if self.prefix is not None and not bool(((found >= 0) & (found <= seq)).all()):
            raise ModelError(f"attention prefix: lengths {found.tolist()[:5]}; expected 0 to {seq}")

    def mask(self, hub_config: Any, hidden: Tensor, *, windowed: bool = False) -> Any:
        """Return the mask that blocks take for hidden states ``[batch, seq, hidden]``; of ``causal`` transformers' own.

        `check` has passed for its rows and tokens. With `windowed` no token sees one that is ``sliding_window``
        of the config or more before it.

        Raises:
            ModelError: A window is asked for, and the kind lets tokens see later ones.
        """
        batch, seq = hidden.shape[:2]
        if self.prefix is None and self.kind != "bidirectional":
            ids = None if self.documents is None else self.positions(seq, hidden.device)
            of_layer = create_sliding_window_causal_mask if windowed else create_causal_mask
            return of_layer(
                config=hub_config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=ids
            )
        if windowed:
            raise ModelError(f"attention {self.kind}: is not known in layers with a sliding window; take causal")
        seen = torch.ones(batch, seq, seq, dtype=torch.bool, device=hidden.device)
        if self.prefix is not None:
            in_prefix = torch.arange(seq, device=hidden.device) < self.prefix.to(hidden.device).unsqueeze(1)
            seen = seen.tril() | in_prefix.unsqueeze(1)
        return written_mask(hub_config, hidden, seen.unsqueeze(1))


CAUSAL = AttentionPattern()


def written_mask(hub_config: Any, hidden: Tensor, seen: Tensor) -> Tensor:
    """Return a mask ``[batch, 1, seq, columns]`` as the kernel of the config takes it, from what each token sees."""
    if hub_config._attn_implementation != "eager":
        return seen
    hides = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
    return hides.masked_fill(~seen, torch.finfo(hidden.dtype).min)
