"""T5: an encoder and a decoder; both sides of a row cross between stages in one tensor, encoder first.

A row's prefix is the encoder's text. What is predicted behind it is the decoder's, moved one token to the right behind
the token that starts a decoder, so a message has, for rows of ``seq`` tokens::

    encoder's tokens [prefix] | decoder's tokens [seq + 1 - prefix] | biases of scores [rows]

All blocks of a side add one bias to their scores, learned by the side's first block: its numbers stand in the first
row of a microbatch, so that stages behind that block compute by it, and hand gradients of it back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.models.t5.modeling_t5 import T5Attention

from phalanx.errors import ModelError
from phalanx.models.family import CAUSAL, AttentionPattern, Family
from phalanx.planner.model.config_keys import ConfigKeys


class Sides:
    """Where the tokens of encoder and decoder are in a tensor ``[batch, seq + 1, ...]``.

    An encoder has at least one token, a decoder as well, whatever rows say.

    Attributes:
        seen: Visible tokens of each row's encoder, bool ``[batch, longest]``; None where rows have equal lengths.
    """

    def __init__(self, pattern: AttentionPattern, seq: int) -> None:
        if pattern.prefix is None:
            raise ModelError("t5: its rows say which tokens the encoder has; take an objective that has prefixes")
        if seq < 1:
            raise ModelError("t5: found a message without tokens; expected rows of at least one")
        prefix = pattern.prefix.clamp(1, seq)
        self.rows = seq + 1
        self.encoder_mask: Tensor | None = None
        self._max_encoder_tokens = int(prefix.max())
        shortest = int(prefix.min())
        if shortest == self._max_encoder_tokens:
            return
        column = prefix.unsqueeze(1)
        counted = torch.arange(self.rows, device=prefix.device)
        encoder, decoder = counted[: self._max_encoder_tokens], counted[: self.rows - shortest]
        self.encoder_mask = encoder < column
        self._row = torch.arange(len(prefix), device=prefix.device).unsqueeze(1)
        self._encoder = encoder.minimum(column - 1)
        self._decoder = (column + decoder).clamp(max=seq)
        self._joined = torch.where(counted < column, counted, self._max_encoder_tokens + counted - column)

    def split_sides(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Return each side's tokens; shorter ones than a batch's longest are filled up behind."""
        if self.encoder_mask is None:
            # products of slices are rounded otherwise than those of tensors of their own
            return joined[:, : self._max_encoder_tokens].contiguous(), joined[
                :, self._max_encoder_tokens : self.rows
            ].contiguous()
        return joined[self._row, self._encoder], joined[self._row, self._decoder]

    def join_sides(self, encoder: Tensor, decoder: Tensor) -> Tensor:
        """Return both sides' tokens in one tensor, without filling."""
        joined = torch.cat([encoder, decoder], dim=1)
        return joined if self.encoder_mask is None else joined[self._row, self._joined]


class T5(Family):
    """The order of ``T5ForConditionalGeneration.forward``; the encoder's blocks are the first layers."""

    model_type = "t5"
    prefix = "t5"
    trunk = ""
    blocks = "encoder.block"
    first_parts = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    last_parts = ("decoder.final_layer_norm",)
    embedding_weight = "shared.weight"
    other_embeddings = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    attention_kinds = frozenset({"prefix"})
    attention_inputs = ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v")
    feed_forward_inputs = ("layer.1.DenseReluDense.wi",)
    # what transformers writes into a config beside the fields of its class
    old_keys = (
        "decoder_start_token_id",
        "tie_word_embeddings",
        "scale_decoder_outputs",
        "dense_act_fn",
        "is_gated_act",
        "n_positions",
    )

    def whole_model(self, hub_config: Any, **options: Any) -> Any:
        """As `Family` says; of a model that does not scale what its head multiplies, the head is its own."""
        model = AutoModelForSeq2SeqLM.from_config(hub_config, dtype=torch.float32, trust_remote_code=False, **options)
        if not self.ties_head(hub_config):
            # transformers ties it while it builds, and leaves it untied where files have both
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.shared.weight))
            nn.init.normal_(model.lm_head.weight, std=hub_config.initializer_factor)
        return model

    def ties_head(self, hub_config: Any) -> bool:
        """Return whether the head is the embedding: as in the first T5, and in none of version 1.1."""
        return bool(hub_config.scale_decoder_outputs)

    def num_layers(self, hub_config: Any) -> int:
        return int(hub_config.num_layers) + int(hub_config.num_decoder_layers)

    def all_blocks(self, trunk: Any) -> list[nn.Module]:
        """Return the blocks of both sides, the encoder's first."""
        return [*trunk.encoder.block, *trunk.decoder.block]

    def parts_beside(self, hub_config: Any, layer: int) -> tuple[str, ...]:
        """Return the norm that ends the encoder, beside its last block."""
        return ("encoder.final_layer_norm",) if layer == hub_config.num_layers - 1 else ()

    def find_objection(self, hub_config: Any) -> str | None:
        """Refuse half a model, and a decoder that nothing starts."""
        if hub_config.is_decoder or not hub_config.is_encoder_decoder:
            return "is_decoder = true or is_encoder_decoder = false: stages carry both sides; leave both keys out"
        start = getattr(hub_config, "decoder_start_token_id", None)
        if type(start) is not int or not 0 <= start < hub_config.vocab_size:
            return (
                f"decoder_start_token_id: found {start!r}; expected a token, which is pad_token_id "
                f"({hub_config.pad_token_id}) in all T5 of the hub"
            )
        return None

    def embed(self, trunk: Any, ids: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """Look up the tokens of both sides, and put the encoder's biases behind them."""
        sides = Sides(pattern, ids.shape[1])
        encoder, decoder = sides.split_sides(
            _insert_start_token(ids, pattern, trunk.encoder.config.decoder_start_token_id)
        )
        encoder = trunk.encoder.dropout(trunk.shared(encoder))
        return _with_biases(sides.join_sides(encoder, trunk.shared(decoder)), _learned_biases(trunk.encoder))

    def context(
        self, trunk: Any, hub_config: Any, hidden: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL
    ) -> dict[str, Any]:
        """Give what all blocks of a stage share; its parts are made when the first block asks for them."""
        return {"shared": _PassTensors(trunk, hidden, self._make_sides(hub_config, hidden, pattern))}

    def block_context(self, hub_config: Any, context: dict[str, Any], layer: int) -> dict[str, Any]:
        """Say which layer it is, and give the mask and the biases of its side."""
        shared, decodes = context["shared"], layer >= hub_config.num_layers
        block_context = {
            **context,
            "layer": layer,
            "mask": shared.side_mask(decodes),
            "bias": shared.side_bias(decodes),
        }
        # a block that is computed again for its backward pass makes none of it again
        return {**block_context, "across": shared.cross_mask() if decodes else None}

    def call_block(self, block: Any, hidden: Tensor, context: dict[str, Any]) -> Tensor:
        """Run a block on its side, and leave the other as it is; the encoder's last block ends the encoder."""
        shared, layer = context["shared"], context["layer"]
        trunk, sides = shared.trunk, shared.sides
        encoder, decoder = sides.split_sides(hidden)
        biases = hidden[:, sides.rows :]
        last = trunk.encoder.config.num_layers - 1
        if layer <= last:
            encoder = block(encoder, context["mask"], context["bias"])[0]
            if layer == last:
                encoder = trunk.encoder.dropout(trunk.encoder.final_layer_norm(encoder))
                decoder = trunk.decoder.dropout(decoder)
        else:
            decoder = block(decoder, context["mask"], context["bias"], encoder, context["across"])[0]
            if layer == last + 1:
                return _with_biases(sides.join_sides(encoder, decoder), _learned_biases(trunk.decoder))
        return torch.cat([sides.join_sides(encoder, decoder), biases], dim=1)

    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        """Apply the final norm to the decoder's side."""
        normed: Tensor = trunk.decoder.dropout(trunk.decoder.final_layer_norm(hidden))
        return normed

    def output_logits(self, stage: Any, hidden: Tensor, pattern: AttentionPattern) -> Tensor:
        """Return logits of the decoder's predictions; at tokens that only the encoder has they are 0."""
        sides = self._make_sides(stage.hub_config, hidden, pattern)
        encoder, decoder = sides.split_sides(hidden)
        features = self.finish(stage.trunk, decoder)
        if self.ties_head(stage.hub_config):
            features = features * stage.hub_config.d_model**-0.5
        logits = stage.lm_head(features)
        # a label stands at the token before the one that it tells, and the decoder's are one further to the right
        return sides.join_sides(logits.new_zeros(*encoder.shape[:2], logits.shape[2]), logits)[:, 1:]

    def _make_sides(self, hub_config: Any, hidden: Tensor, pattern: AttentionPattern) -> Sides:
        return Sides(pattern, hidden.shape[1] - self.facts.rows_beside(ConfigKeys(vars(hub_config), "model config")))


class _PassTensors:
    """What the blocks of a stage share in one pass: biases and masks, each made once."""

    def __init__(self, trunk: Any, hidden: Tensor, sides: Sides) -> None:
        self.trunk = trunk
        self.sides = sides
        self._hidden = hidden
        self._made_tensors: dict[str, Any] = {}

    def side_bias(self, decodes: bool) -> Tensor:
        """Return the biases of a side's scores ``[1, heads, tokens, tokens]``."""
        return self._make_once(f"bias {decodes}", lambda: self._make_bias(decodes))  # type: ignore[no-any-return]

    def side_mask(self, decodes: bool) -> Any:
        """Return the mask of a side's attention to itself."""
        return self._make_once(f"mask {decodes}", lambda: self._make_mask(decodes))

    def cross_mask(self) -> Any:
        """Return the mask of the decoder's attention to the encoder."""
        return self._make_once("across", self._make_cross_mask)

    def _make_once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made_tensors:
            self._made_tensors[name] = make()
        return self._made_tensors[name]

    def _make_bias(self, decodes: bool) -> Tensor:
        config, side = self.trunk.encoder.config, self.trunk.decoder if decodes else self.trunk.encoder
        buckets, heads = config.relative_attention_num_buckets, config.num_heads
        learned = _learned_biases(side)
        if learned is None:
            learned = self._hidden[0, self.sides.rows :].flatten()[: buckets * heads].view(buckets, heads)
        tokens = torch.arange(self.sides.split_sides(self._hidden)[int(decodes)].shape[1], device=self._hidden.device)
        bucket = T5Attention._relative_position_bucket(
            tokens[None, :] - tokens[:, None],
            bidirectional=not decodes,
            num_buckets=buckets,
            max_distance=config.relative_attention_max_distance,
        )
        return nn.functional.embedding(bucket, learned).permute([2, 0, 1]).unsqueeze(0)

    def _make_mask(self, decodes: bool) -> Any:
        encoder, decoder = self.sides.split_sides(self._hidden)
        if decodes:
            return create_causal_mask(
                config=self.trunk.decoder.config, inputs_embeds=decoder, attention_mask=None, past_key_values=None
            )
        return create_bidirectional_mask(
            config=self.trunk.encoder.config, inputs_embeds=encoder, attention_mask=self.sides.encoder_mask
        )

    def _make_cross_mask(self) -> Any:
        encoder, decoder = self.sides.split_sides(self._hidden)
        return create_bidirectional_mask(
            config=self.trunk.decoder.config,
            inputs_embeds=decoder,
            attention_mask=self.sides.encoder_mask,
            encoder_hidden_states=encoder,
        )


def _insert_start_token(ids: Tensor, pattern: AttentionPattern, start: int) -> Tensor:
    """Put the token that starts a decoder behind each row's prefix, ``[batch, seq + 1]``."""
    batch, seq = ids.shape
    places = torch.arange(seq + 1, device=ids.device)
    prefix = ids.new_zeros(batch) if pattern.prefix is None else pattern.prefix
    prefix = prefix.clamp(1, seq).to(ids.device).unsqueeze(1)
    start_token = ids.new_full((batch, 1), start)
    unmoved, moved = torch.cat([ids, start_token], dim=1), torch.cat([start_token, ids], dim=1)
    return torch.where(places < prefix, unmoved, torch.where(places == prefix, start, moved))


def _learned_biases(side: Any) -> Tensor | None:
    """Return the biases that a side's first block learns, ``[buckets, heads]``; None where another stage has it."""
    first = side.block[0]
    return first.layer[0].SelfAttention.relative_attention_bias.weight if hasattr(first, "layer") else None


def _with_biases(hidden: Tensor, biases: Tensor | None) -> Tensor:
    """Put biases into rows behind the tokens, in the first row of a microbatch."""
    if biases is None:
        raise ModelError("t5: the biases of a side are where its first block is, which this stage has not")
    width = hidden.shape[2]
    count = -(-biases.numel() // width)
    flat = nn.functional.pad(biases.flatten(), (0, count * width - biases.numel())).to(hidden.dtype)
    rows = nn.functional.pad(flat.view(1, count, width), (0, 0, 0, 0, 0, len(hidden) - 1))
    return torch.cat([hidden, rows], dim=1)
