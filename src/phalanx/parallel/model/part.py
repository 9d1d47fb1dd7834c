"""One rank's part of the model: a stage, of which tensor and context parallel ranks share the work."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from phalanx.models import CAUSAL, MARKED_KINDS, AttentionPattern, StageModule, run_block
from phalanx.objectives import IGNORE, causal_lm_loss
from phalanx.parallel.context.ring import own_positions, share_by_ring
from phalanx.parallel.context.ulysses import share_context
from phalanx.parallel.groups.collectives import Group, copy_to_ranks, gather_copies, gather_parts, keep_slice
from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.model.compiled import compile_blocks
from phalanx.parallel.model.recompute import recompute_function
from phalanx.parallel.tensor.tensor_parallel import TensorCut, cut_stage


def shared_causal_lm(logits: Tensor, labels: Tensor, group: Group) -> Tensor:
    """Summed cross-entropy, as `phalanx.objectives.causal_lm` gives it, on every rank.

    Args:
        logits: This rank's columns, ``[batch, seq, vocab / ranks]``, any float type; the loss is taken in float32.
        labels: int64 ``[batch, seq]``; IGNORE where no loss is taken.
        group: The ranks, in the order of their columns.
    """
    width = logits.shape[-1]
    loss: Tensor = _SharedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.to(torch.float32).reshape(-1, width), labels.reshape(-1), group.rank() * width, group
    )
    return loss


class _SharedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, group: Group) -> Tensor:
        peak = logits.detach().max(dim=-1).values
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = logits - peak.unsqueeze(1)
        weights = shifted.exp()
        is_here = (labels >= start) & (labels < start + logits.shape[1])
        column = (labels - start).clamp(0, logits.shape[1] - 1)
        target_weight = torch.where(is_here, shifted.gather(1, column.unsqueeze(1)).squeeze(1), shifted.new_zeros(()))
        sums = torch.stack((weights.sum(dim=-1), target_weight))
        dist.all_reduce(sums, group=group)
        counted = labels != IGNORE
        ctx.save_for_backward(weights / sums[0].unsqueeze(1), column, is_here, counted)
        losses = torch.where(counted, sums[0].log() - sums[1], sums.new_zeros(()))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shares, column, is_here, counted = ctx.saved_tensors
        result = torch.where(counted.unsqueeze(1), shares, shares.new_zeros(()))
        hits = (is_here & counted).to(result.dtype).unsqueeze(1)
        result = result.scatter_add(1, column.unsqueeze(1), -hits)
        return result * gradient, None, None, None


_SEQUENCE = 1
_FULL = "full_attention"
_ALIBI, _COSINES, _POSITIONS, _MASK = "alibi", "position_embeddings", "position_ids", "attention_mask"


class StagePart(nn.Module):
    """A stage's modules in the stage's own order, each rank on its share of heads and sequence.

    The first stage takes whole rows of ids ``[batch, seq]``, others this rank's slice of hidden states.

    Args:
        stage: Whole; it is cut here.
        narrow: Type in which products of matrices are computed while training; None is float32. Parameters, and what
            passes between stages, are in float32 either way.
    """

    def __init__(self, stage: StageModule, domain: Domain, *, narrow: torch.dtype | None = None) -> None:
        super().__init__()
        config = domain.config
        self._domain = domain
        self._narrow = narrow
        self._cuts_sequence = config.sequence_parallel
        self._embedding_seed = 0
        # masks and tables are made by the config as it was, whatever kernel runs
        self._tables_by = copy.deepcopy(stage.hub_config)
        self.cut: TensorCut = cut_stage(stage, domain.tensors, cuts_sequence=self._cuts_sequence)
        share = share_by_ring if config.context == "ring" else share_context
        share(stage, domain.context)
        self.stage = stage
        if config.compile:
            compile_blocks(stage)
        self._run = recompute_function(run_block, config.activation_checkpointing)

    def begin_step(self, seed: int) -> None:
        """Seed the dropout of a step's embeddings; tensor parallel ranks that share the sequence have one seed."""
        self._embedding_seed = seed

    @property
    def num_slices(self) -> int:
        """Into how many slices the sequence is cut between blocks."""
        return self._domain.config.cp * (self._domain.config.tp if self._cuts_sequence else 1)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Run the part.

        Args:
            x: Ids ``[batch, seq]`` at the first stage, else hidden states ``[batch, seq / slices, hidden]``.
            seen: Mask row of each row, where it has one: int64 ``[batch, seq]``, the number of each token's document in
                whole rows; or ``[batch]``, the number of its prefix tokens.

        Returns:
            At the last stage logits ``[batch, seq / cp, columns]`` of this rank's columns, else hidden states.
        """
        with self._autocast_context():
            stage = self.stage
            pattern = self._attention_pattern(seen)
            hidden = self._embed_ids(x, pattern) if stage.spec.is_first else x
            context, balance = self._block_context(hidden, pattern), stage.router_balance()
            for layer, block in enumerate(stage.own_blocks, stage.spec.first_layer):
                block_context = stage.family.block_context(self._tables_by, context, layer)
                hidden = self._run(block, hidden, stage.with_prefix(block, block_context), stage.family, balance)
            result = self._finish_hidden(hidden, pattern) if stage.spec.is_last else hidden
        # the shapes that a pipeline was told of are those of float32
        return result.to(torch.float32)

    def slice_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Summed loss of this rank's slice of the sequence, the same on all tensor parallel ranks.

        Args:
            logits: Output of the last stage.
            labels: ``[batch, seq / cp]``.
        """
        if self.cut.shares_vocabulary:
            return shared_causal_lm(logits, labels, self._domain.tensors)
        return causal_lm_loss(logits, labels)[0]

    def own_labels(self, labels: Tensor) -> Tensor:
        """This rank's positions of labels ``[batch, seq]``."""
        return self._own_positions(labels)

    def _attention_pattern(self, seen: Tensor | None) -> AttentionPattern:
        kind = self.stage.attends
        if kind == "causal":
            return CAUSAL
        return AttentionPattern(kind, **({kind: seen} if kind in MARKED_KINDS else {}))

    def _embed_ids(self, ids: Tensor, pattern: AttentionPattern) -> Tensor:
        # every rank looks up the whole row: positions count from its beginning, or from that of a document
        ids = self.stage.with_prompt(ids)
        with self._drop_alike():
            hidden = self.stage.family.embed(self.stage.trunk, ids, self.stage.num_virtual_tokens, pattern)
        hidden = self._own_positions(hidden).contiguous()
        return keep_slice(hidden, _SEQUENCE, self._domain.tensors) if self._cuts_sequence else hidden

    @contextlib.contextmanager
    def _drop_alike(self) -> Iterator[None]:
        """Drop the same numbers of an embedding on all ranks that share the sequence: each gets the gradient of all."""
        if not self._cuts_sequence:
            yield
            return
        device = self._domain.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self._embedding_seed)
            yield
        # the next microbatch drops others
        self._embedding_seed += 1

    def _finish_hidden(self, hidden: Tensor, pattern: AttentionPattern) -> Tensor:
        hidden = self.stage.without_prompt(hidden)
        if self.stage.family.facts.predicts == "target":
            return self.stage.family.output_logits(self.stage, hidden, pattern)
        hidden = self.stage.family.finish(self.stage.trunk, hidden)
        tensors = self._domain.tensors
        if self.cut.shares_vocabulary:
            hidden = gather_parts(hidden, _SEQUENCE, tensors) if self._cuts_sequence else copy_to_ranks(hidden, tensors)
        elif self._cuts_sequence:
            hidden = gather_copies(hidden, _SEQUENCE, tensors)
        return self.stage.through_heads(hidden)

    def _block_context(self, hidden: Tensor, pattern: AttentionPattern) -> dict[str, Any]:
        """Return the arguments of blocks, made for whole rows and all heads, then sliced."""
        stage, config = self.stage, self._domain.config
        positions = hidden
        if self.num_slices > 1:
            length = hidden.shape[_SEQUENCE] * self.num_slices
            positions = hidden.new_empty((1, 1, 1)).expand(hidden.shape[0], length, hidden.shape[2])
        context = stage.family.context(stage.trunk, self._tables_by, positions, stage.num_virtual_tokens, pattern)
        if config.cp > 1:
            if pattern is CAUSAL:
                context[_MASK] = _implicit_mask(context[_MASK])
            for key in (_COSINES, _POSITIONS):
                if key in context:
                    context[key] = self._own_table(context[key])
        if config.tp > 1 and _ALIBI in context:
            context[_ALIBI] = self._own_heads(context[_ALIBI], hidden.shape[0])
        return context

    def _own_table(self, table: Any) -> Any:
        if isinstance(table, dict):
            # one for each type of layer
            return {kind: self._own_table(cosines) for kind, cosines in table.items()}
        if isinstance(table, tuple):
            return tuple(self._own_positions(cosines) for cosines in table)
        return self._own_positions(table)

    def _own_positions(self, whole: Tensor) -> Tensor:
        return own_positions(whole, _SEQUENCE, self._domain.config, self._domain.cp)

    def _own_heads(self, table: Tensor, batch: int) -> Tensor:
        by_head = table.view(batch, -1, *table.shape[1:])
        return by_head.chunk(self._domain.config.tp, 1)[self._domain.tp].flatten(0, 1)

    def _autocast_context(self) -> contextlib.AbstractContextManager[object]:
        # as for a whole model: validation is in float32
        if self._narrow is None or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return torch.autocast(self._domain.device.type, dtype=self._narrow)


def _implicit_mask(mask: Any) -> Any:
    """Leave a causal mask to the kernel, which knows it; a window stays written, of whole rows as all that is seen."""
    if not isinstance(mask, dict):
        return None
    return {kind: None if kind == _FULL else kind_mask for kind, kind_mask in mask.items()}
