"""A model family: which tokens see which, and the facts with which it is cut; everything else is transformers' own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from phalanx.errors import ModelError
from phalanx.models.config import AttentionKind
from phalanx.models.routing import RouterBalance
from phalanx.planner.model.families import FAMILIES, FamilyFacts

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
        arguments = {name for name in ("prefix", "documents") if getattr(self, name) is not None}
        expected = {self.kind} & {"prefix", "documents"}
        if arguments != expected:
            raise ModelError(
                f"attention {self.kind}: was given {sorted(arguments) or 'nothing'}, "
                f"needs {sorted(expected) or 'nothing'}"
            )

    def token_positions(self, seq: int, device: torch.device, before: int = 0) -> Tensor:
        """Return the position of each token: ``[1, seq]``, or ``[batch, seq]`` where documents begin anew."""
        positions = torch.arange(before, before + seq, device=device).unsqueeze(0)
        if self.documents is None:
            return positions
        begins = torch.ones_like(self.documents, dtype=torch.bool)
        begins[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        first = torch.where(begins, positions, torch.zeros((), dtype=positions.dtype, device=device))
        return positions - first.cummax(dim=1).values

    def check_shape(self, batch: int, seq: int) -> None:
        """Return where the pattern is one of so many rows of so many tokens."""
        boundaries = self.prefix if self.documents is None else self.documents
        expected_shape = (batch,) if self.documents is None else (batch, seq)
        if boundaries is None:
            return
        if boundaries.dtype != torch.int64 or tuple(boundaries.shape) != expected_shape:
            raise ModelError(
                f"attention {self.kind}: {boundaries.dtype} {list(boundaries.shape)}; "
                f"expected int64 {list(expected_shape)}"
            )
        if self.prefix is not None and not bool(((boundaries >= 0) & (boundaries <= seq)).all()):
            raise ModelError(f"attention prefix: lengths {boundaries.tolist()[:5]}; expected 0 to {seq}")

    def block_mask(self, hub_config: Any, hidden: Tensor, *, windowed: bool = False) -> Any:
        """Return the mask that blocks take for hidden states ``[batch, seq, hidden]``; of ``causal`` transformers' own.

        `check` has passed for its rows and tokens. With `windowed` no token sees one that is ``sliding_window``
        of the config or more before it.

        Raises:
            ModelError: A window is asked for, and the kind lets tokens see later ones.
        """
        batch, seq = hidden.shape[:2]
        if self.prefix is None and self.kind != "bidirectional":
            ids = None if self.documents is None else self.token_positions(seq, hidden.device)
            of_layer = create_sliding_window_causal_mask if windowed else create_causal_mask
            return of_layer(
                config=hub_config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=ids
            )
        if windowed:
            raise ModelError(f"attention {self.kind}: is not known in layers with a sliding window; take causal")
        seen = torch.ones(batch, seq, seq, dtype=torch.bool, device=hidden.device)
        if self.prefix is not None:
            seen = seen.tril() | _inside_prefix(self.prefix, hidden[..., 0]).unsqueeze(1)
        return written_mask(hub_config, hidden, seen.unsqueeze(1))


CAUSAL = AttentionPattern()


def written_mask(hub_config: Any, hidden: Tensor, seen: Tensor) -> Tensor:
    """Return a mask ``[batch, 1, seq, columns]`` for the config's kernel from the visible tokens."""
    if hub_config._attn_implementation != "eager":
        return seen
    hides = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
    return hides.masked_fill(~seen, torch.finfo(hidden.dtype).min)


# A stage that attends inside documents is told where they begin by one more number for each token, behind its id or its
# hidden state: 1 where a document begins, 0 elsewhere. One whose rows have a prefix is told by 1 for each token of it.
# So what a stage is sent is the whole of its input, which digests, audits, evidence and replays cover, and there is
# nothing beside it to lie about.
_HALF = 0.5

MARKED_KINDS: frozenset[AttentionKind] = frozenset({"documents", "prefix"})
"""The kinds of attention that each row says more about: extra rows of a batch have the kind's name."""


def with_marks(ids: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
    """Return ids with the marks of their attention, int64 ``[batch, seq, 2]``; ids as they are where there are none.

    Args:
        ids: int64 ``[batch, seq]``.
        extras: Rows of a batch: ``documents``, int64 ``[batch, seq]``, the number of each token's document in its row;
            or ``prefix``, int64 ``[batch]``, how many tokens of each row are its prefix. Others are not looked at.
    """
    if "documents" in extras:
        marks = _document_borders(extras["documents"])
    elif "prefix" in extras:
        marks = _inside_prefix(extras["prefix"], ids)
    else:
        return ids
    return torch.stack([ids, marks.to(ids.dtype)], dim=-1)


def split_marks(x: Tensor, kind: AttentionKind, *, embeds: bool) -> tuple[Tensor, AttentionPattern]:
    """Return a stage's input without the marks, and the attention that they stand for.

    Args:
        x: ``[batch, seq, hidden + 1]``; ids ``[batch, seq, 2]`` of the stage that embeds, or ``[batch, seq]``, where
            every row is one document, or has no prefix.
        kind: One of `MARKED_KINDS`.
    """
    if embeds and x.dim() == 2:
        if kind == "prefix":
            return x, AttentionPattern(kind, prefix=torch.zeros(len(x), dtype=torch.int64, device=x.device))
        return x, AttentionPattern(kind, documents=torch.zeros_like(x))
    # what is no mark is none: a number that is not one reads as 0, and the digest has told of it
    marks = (x[..., -1].detach() > _HALF).to(torch.int64)
    rest = x[..., 0] if embeds else x[..., :-1]
    if kind == "prefix":
        return rest, AttentionPattern(kind, prefix=marks.sum(dim=1))
    return rest, AttentionPattern(kind, documents=marks.cumsum(dim=1))


def join_marks(hidden: Tensor, pattern: AttentionPattern) -> Tensor:
    """Return hidden states with the marks that the next stage needs, ``[batch, seq, hidden + 1]``."""
    if pattern.documents is not None:
        marks = _document_borders(pattern.documents)
    elif pattern.prefix is not None:
        marks = _inside_prefix(pattern.prefix, hidden[..., 0])
    else:
        return hidden
    return torch.cat([hidden, marks.to(hidden.dtype).unsqueeze(-1)], dim=-1)


def _inside_prefix(prefix: Tensor, row: Tensor) -> Tensor:
    return torch.arange(row.shape[1], device=row.device) < prefix.to(row.device).unsqueeze(1)


def _document_borders(documents: Tensor) -> Tensor:
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins


HEAD = "lm_head"
"""The head of every decoder, and the place of a head that is trained in its stead."""
SCORE = "score"
"""The name of the head that gives one number for each token, as the hub has it."""
SCORE_WEIGHT = "score.weight"


class Family(ABC):
    """The slicing rule of one ``model_type``.

    The blocks, norms, masks and rotary tables are transformers' modules and functions; a family
    only repeats the order in which the whole model's ``forward`` calls them.

    Attributes:
        model_type: The hub's name of the family.
        prefix: Name of the model without head; hub files may leave it out of tensor names.
        trunk: Dotted name of the module that holds embeddings, blocks and final norm.
        attention_inputs: Layers of a block that make q, k and v; a single one makes all three.
        feed_forward_inputs: First feed-forward layers of a block.
        past_key: Name under which a block takes earlier keys and values.
        fan_in_fan_out: True where linear weights are stored ``[in, out]``.
        old_keys: Keys that transformers accepts beside the fields of its config class.
        attention_kinds: The kinds of attention that transformers has for the family.
        head: Dotted name of the layer that gives a number for each token of the vocabulary, the weight of which a tied
            head shares.
        scoring: Modules beside the trunk that the last stage alone has; one behind the other they give logits.
        other_embeddings: Further names under which files may hold the embedding.
    """

    model_type: str
    prefix: str
    trunk: str
    attention_inputs: tuple[str, ...]
    feed_forward_inputs: tuple[str, ...]
    past_key: str = "past_key_values"
    fan_in_fan_out: bool = False
    old_keys: tuple[str, ...] = ()
    attention_kinds: frozenset[AttentionKind] = ALL_KINDS
    other_embeddings: tuple[str, ...] = ()
    head: str = HEAD
    scoring: tuple[str, ...] = (HEAD,)

    @property
    def head_weight(self) -> str:
        """Full name of the weight of the head."""
        return f"{self.head}.weight"

    def hub_name(self, name: str) -> str:
        """Return the name in the hub's files of a tensor of transformers' modules."""
        return name

    def expert_pieces(self, name: str) -> tuple[str, ...]:
        """Return the names, with ``{}`` for the expert, of the pieces in which the hub's files hold a tensor.

        Args:
            name: Of a tensor of transformers' modules, ``[experts, rows, columns]``.

        Returns:
            The pieces whose rows follow each other in one expert's matrix; none where the files hold the tensor whole.
        """
        return ()

    def whole_model(self, hub_config: Any, **options: Any) -> Any:
        """Return transformers' whole model with its head, by the rules of transformers alone."""
        return AutoModelForCausalLM.from_config(hub_config, dtype=torch.float32, trust_remote_code=False, **options)

    def head_modules(self, model: Any) -> dict[str, Any]:
        """Return the modules behind the trunk of a model or stage; those with logits come first."""
        return {name: head for name in (*self.scoring, SCORE) if (head := getattr(model, name, None)) is not None}

    def score_hidden(self, stage: Any, hub_config: Any, hidden: Tensor) -> Tensor:
        """Turn what `finish` gave into logits, ``[batch, seq, vocab]``."""
        for name in self.scoring:
            hidden = stage.get_submodule(name)(hidden)
        return self.scale_logits(hub_config, hidden)

    def ties_head(self, hub_config: Any) -> bool:
        """Return whether the head is the token embedding."""
        return bool(hub_config.tie_word_embeddings)

    def num_layers(self, hub_config: Any) -> int:
        """Return how many blocks a whole model has."""
        return int(hub_config.num_hidden_layers)

    def all_blocks(self, trunk: Any) -> list[nn.Module]:
        """Return the blocks of a whole model, in the order in which they are called."""
        return list(trunk.get_submodule(self.blocks))

    def parts_beside(self, hub_config: Any, layer: int) -> tuple[str, ...]:
        """Return the trunk members that a layer's stage has, beyond those of the first and the last stage."""
        return ()

    @property
    @abstractmethod
    def blocks(self) -> str:
        """Name of the list of blocks in the trunk."""

    @property
    @abstractmethod
    def first_parts(self) -> tuple[str, ...]:
        """Members of the trunk that only the first stage has."""

    @property
    @abstractmethod
    def last_parts(self) -> tuple[str, ...]:
        """Members of the trunk that only the last stage has."""

    @property
    @abstractmethod
    def embedding_weight(self) -> str:
        """Full name of the tensor that a tied head shares."""

    @property
    def facts(self) -> FamilyFacts:
        """What is known of the family without torch, such as which matrices LoRA adapts unless told otherwise."""
        return FAMILIES[self.model_type]

    @property
    def usual_attention(self) -> AttentionKind:
        """The kind of attention where nothing else is said: an encoder has no causal one."""
        return "causal" if "causal" in self.attention_kinds else min(self.attention_kinds)

    def choose_kernel(self, requested: str) -> str:
        """Return the kernel that the family runs when `requested` is asked for."""
        return requested

    def check_pattern(self, pattern: AttentionPattern, before: int) -> None:
        """Return where the family has a kind of attention."""
        if pattern.kind not in self.attention_kinds:
            raise ModelError(
                f"{self.model_type}: has no {pattern.kind} attention in transformers, only "
                f"{', '.join(sorted(self.attention_kinds))}"
            )
        if before and pattern.kind != "causal":
            raise ModelError(f"attention {pattern.kind}: is not known behind virtual tokens; leave the adapter out")

    def layer_windows(self, hub_config: Any) -> list[int | None]:
        """Return how far back each layer sees, in tokens with the own one, or None where it sees all."""
        return [None] * int(hub_config.num_hidden_layers)

    def find_objection(self, hub_config: Any) -> str | None:
        """Say which option of the config cannot be sliced, why, and what to set; or None."""
        return None

    def max_positions(self, hub_config: Any) -> int | None:
        """Return the longest sequence in tokens, or None where positions are computed."""
        return None

    def restore_buffers(self, trunk: Any, hub_config: Any) -> None:
        """Recompute the tensors that are in no file; the skeleton on the meta device lost them."""
        return None

    @abstractmethod
    def embed(self, trunk: Any, ids: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """Turn ids ``[batch, seq]`` into hidden states ``[batch, seq, hidden]``; positions begin at `before`."""

    @abstractmethod
    def context(
        self, trunk: Any, hub_config: Any, hidden: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL
    ) -> dict[str, Any]:
        """Return what blocks are called with beside the hidden states ``[batch, seq, hidden]``.

        `before` virtual tokens, which every token sees, come before the first one; `pattern` says what else it sees.
        """

    def block_context(self, hub_config: Any, context: dict[str, Any], layer: int) -> dict[str, Any]:
        """Return the arguments of one block, from the shared ones of `context`."""
        return context

    def call_block(self, block: Any, hidden: Tensor, context: dict[str, Any]) -> Any:
        """Run one block with the arguments of `block_context`; only its hidden states are read."""
        return block(hidden, **context)

    def router_balance(self, hub_config: Any, share: float) -> RouterBalance | None:
        """Return the term that the router adds to the gradient of every block's output; None where there is none.

        Args:
            share: Share of the whole step in this microbatch.
        """
        return None

    def scale_logits(self, hub_config: Any, logits: Tensor) -> Tensor:
        """Scale the logits of the language model's head, of any number of columns, as the whole model does."""
        return logits

    def output_logits(self, stage: Any, hidden: Tensor, pattern: AttentionPattern) -> Tensor:
        """Turn the last block's output into the last stage's output, ``[batch, seq, vocab]``."""
        scores: Tensor = stage.through_heads(self.finish(stage.trunk, hidden))
        return scores

    @abstractmethod
    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        """Turn the last block's output into the head's input, ``[batch, seq, features]``."""


def attention_mask(
    hub_config: Any, hidden: Tensor, before: int, pattern: AttentionPattern, *, windowed: bool = False
) -> Any:
    """Return the mask of a pattern; a causal one is None for sdpa, which then masks inside the kernel.

    Behind earlier tokens it is written out, ``[1, 1, seq, before + seq]``: the kernel would count columns from the
    first one. Of a layer with a sliding window there are as many columns before as it keeps, one less than its window.
    No position ids are handed in: ours count up from 0, and transformers would only use them to look for several
    sequences in one row, which waits for the device and finds none.

    Raises:
        ModelError: A layer with a sliding window cannot have the pattern.
    """
    if not before:
        return pattern.block_mask(hub_config, hidden, windowed=windowed)
    seq, window = hidden.shape[1], int(hub_config.sliding_window) if windowed else None
    num_earlier = before if window is None else min(before, window - 1)
    if seq == 1 and (window is None or num_earlier + 1 < window):
        # it sees everything; where a window is full, transformers writes that out, and its kernel rounds otherwise
        return None
    seen = torch.ones(seq, num_earlier + seq, dtype=torch.bool, device=hidden.device).tril(num_earlier)
    return written_mask(
        hub_config, hidden, (seen if window is None else seen.triu(num_earlier - window + 1))[None, None]
    )
