"""Families that are cut by transformers' own pipeline plans: each row of the table completes one plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families.facts import ExpertsRule, FamilyFacts, Feed, SharedAxis, SlicingRule, Width
from phalanx.planner.model.shape import ModelShape

Flag = bool | tuple[str, bool]
"""True or false, or the config key that says so with transformers' default."""

Matrices = tuple[tuple[str, Feed, Width], ...]

_QKVO: Matrices = (
    ("self_attn.q_proj", "first", "queries"),
    ("self_attn.k_proj", "first", "shared"),
    ("self_attn.v_proj", "first", "shared"),
    ("self_attn.o_proj", "mixed", "stream"),
)
_GATED: Matrices = (
    ("mlp.gate_proj", "second", "inner"),
    ("mlp.up_proj", "second", "inner"),
    ("mlp.down_proj", "inner", "stream"),
)
_FUSED_GATE: Matrices = (("mlp.gate_up_proj", "second", "both"), ("mlp.down_proj", "inner", "stream"))
_COLUMNS: tuple[Feed, ...] = ("first", "second")
_ATTENTION_BIAS = ("attention_bias", False)
_MLP_BIAS = ("mlp_bias", False)
_CP: frozenset[SharedAxis] = frozenset({"cp"})
_TP: frozenset[SharedAxis] = frozenset({"tp"})
_BOTH: frozenset[SharedAxis] = frozenset({"tp", "cp"})


@dataclass(frozen=True)
class PlannedFamily:
    """One line of the table.

    Attributes:
        slicing: Facts that transformers' plan lacks.
        matrices: See `FamilyFacts`.
        adapter_targets: See `FamilyFacts`.
        norms: Number of norms in a block over the width of the stream.
        norm_weights: Parameters of a norm for each number: none, a factor, or a factor and a bias.
        head_norm: Whether queries and keys have norms, over each head or over all heads together.
        activation: Config key of the MLP's activation function, with transformers' default.
        tied: transformers' default of ``tie_word_embeddings``.
        rms: Norms are composed of several kernels.
        heads_first: See `FamilyFacts`.
        per_head: See `FamilyFacts`.
        shared_axes: See `FamilyFacts`.
        defaults: transformers' defaults of config keys that real configs may leave out.
        experts: See `FamilyFacts`.
    """

    slicing: SlicingRule = field(default_factory=SlicingRule)
    matrices: Matrices = _QKVO + _GATED
    adapter_targets: tuple[str, ...] = ("q_proj", "v_proj")
    biased: Mapping[Feed, Flag] = field(default_factory=dict)
    norms: int = 2
    norm_weights: int = 1
    head_norm: tuple[Flag, Literal["head", "all"]] | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    tied: bool = False
    head_bias: bool = False
    rms: bool = True
    heads_first: bool = False
    per_head: tuple[str, ...] = ()
    shared_axes: frozenset[SharedAxis] = frozenset()
    defaults: Mapping[str, int] = field(default_factory=dict)
    experts: ExpertsRule | None = None

    @property
    def family_facts(self) -> FamilyFacts:
        """The family's line in the table of all families."""
        return FamilyFacts(
            shape=self._read_shape,
            matrices=self.matrices,
            adapter_targets=self.adapter_targets,
            per_head=self.per_head,
            heads_first=self.heads_first,
            composed_norm=self.rms,
            norms=self.norms,
            shared_axes=self.shared_axes,
            experts=self.experts,
            slicing=self.slicing,
        )

    def _read_shape(self, keys: ConfigKeys) -> ModelShape:
        hidden, vocab, ffn = (
            keys.read_size("hidden_size"),
            keys.read_size("vocab_size"),
            keys.read_size("intermediate_size"),
        )
        heads, head_dim = keys.read_heads(hidden, "num_attention_heads")
        head_dim = keys.read_size("head_dim", default=self.defaults.get("head_dim", head_dim))
        kv_heads = keys.read_size("num_key_value_heads", default=self.defaults.get("num_key_value_heads", heads))
        gated = self.experts is not None or any(width == "both" or "gate" in name for name, _, width in self.matrices)
        tied = keys.read_flag("tie_word_embeddings", self.tied)
        saved = keys.saved_tensors(*self.activation)
        bare = ModelShape(
            layers=keys.read_size("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=ffn,
            vocab=vocab,
            gated=gated,
            tied=tied,
            ffn_saved=saved + 2 if gated else saved,
            ffn_composed=0 if gated else keys.composed_tensors(*self.activation),
            fused=not self.slicing.plain_attention,
            layer_matrix=0,
            layer_split=0,
            layer_whole=0,
            embedding=vocab * hidden,
            final=hidden * self.norm_weights,
            head=(0 if tied else vocab * hidden) + (vocab if self.head_bias else 0),
            head_matrix=vocab * hidden,
        )
        counted = self._count_parameters(bare, keys)
        return counted if self.experts is None else _with_experts(counted, self.experts, keys)

    def _count_parameters(self, shape: ModelShape, keys: ConfigKeys) -> ModelShape:
        """Add the parameters of one block."""
        matrix, columns, rows = 0, 0, 0
        for _, feed, width in self.matrices:
            outputs = shape.output_width(width)
            matrix += shape.input_width(feed) * outputs
            biases = outputs if _is_on(keys, self.biased.get(feed, False)) else 0
            if feed in _COLUMNS:
                columns += biases
            else:
                rows += biases
        head_norms = self._head_norms(shape, keys)
        rest = rows + self.norm_weights * (self.norms * shape.hidden + head_norms)
        return replace(
            shape,
            layer_matrix=matrix,
            layer_split=matrix + columns,
            layer_whole=rest,
            head_norms=head_norms > 0,
        )

    def _head_norms(self, shape: ModelShape, keys: ConfigKeys) -> int:
        """Numbers that the norms of queries and keys are over."""
        if self.head_norm is None or not _is_on(keys, self.head_norm[0]):
            return 0
        if self.head_norm[1] == "head":
            return 2 * shape.head_dim
        return shape.output_width("queries") + shape.output_width("shared")


def _with_experts(shape: ModelShape, rule: ExpertsRule, keys: ConfigKeys) -> ModelShape:
    """Add router and experts to a block without an MLP: what a token is multiplied with, and what is held."""
    width = keys.read_size(rule.width[0], default=rule.width[1])
    count = keys.read_size("num_experts", "num_local_experts", default=rule.count)
    asked = keys.read_size(rule.asked[0], default=rule.asked[1])
    if asked > count:
        raise keys.refusal(rule.asked[0], asked, f"expected at most its {count} experts")
    always = 0 if rule.shared is None else keys.read_size(rule.shared[0], default=rule.shared[1])
    for key, plain in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        keys.require_value(key, plain)
    hidden = shape.hidden
    beside = hidden * count + (always and hidden * (3 * always + 1))
    return replace(
        shape,
        ffn=asked * width + always,
        layer_matrix=shape.layer_matrix + beside + asked * 3 * hidden * width,
        layer_split=shape.layer_split + count * 3 * hidden * width,
        layer_whole=shape.layer_whole + beside,
        experts=count,
    )


def _is_on(keys: ConfigKeys, flag: Flag) -> bool:
    return flag if isinstance(flag, bool) else keys.read_flag(*flag)


def _bias_everywhere(flag: Flag) -> dict[Feed, Flag]:
    return dict.fromkeys(("first", "mixed", "second", "inner"), flag)


def _bias_of_attention(flag: Flag) -> dict[Feed, Flag]:
    return {"first": flag, "mixed": flag}


_LLAMA_BIAS: Mapping[Feed, Flag] = _bias_of_attention(_ATTENTION_BIAS) | {"second": _MLP_BIAS, "inner": _MLP_BIAS}
_GEMMA = PlannedFamily(
    SlicingRule(scaled_embedding=True),
    biased=_bias_of_attention(_ATTENTION_BIAS),
    activation=("hidden_act", "gelu_pytorch_tanh"),
    tied=True,
    shared_axes=_CP,
    defaults={"num_key_value_heads": 16, "head_dim": 256},
)
_LATER_GEMMA = replace(
    _GEMMA,
    norms=4,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    defaults={"num_key_value_heads": 4, "head_dim": 256},
)
_COHERE = PlannedFamily(
    SlicingRule(logits=("multiplied", "logit_scale")),
    biased=_bias_of_attention(_ATTENTION_BIAS),
    norms=1,
    head_norm=(("use_qk_norm", False), "all"),
    tied=True,
    shared_axes=_CP,
)
_OLMO = PlannedFamily(biased=_bias_of_attention(_ATTENTION_BIAS), shared_axes=_CP)
_QK_NORMED = replace(_OLMO, head_norm=(True, "all"))
_QWEN_EXPERTS = ExpertsRule(width=("moe_intermediate_size", 768), count=128, asked=("num_experts_per_tok", 8))
_OLMOE_EXPERTS = ExpertsRule(width=("intermediate_size", 2048), count=64, asked=("num_experts_per_tok", 8))
_CAPPED: tuple[Literal["capped"], str] = ("capped", "final_logit_softcapping")

PLANNED: dict[str, PlannedFamily] = {
    "arcee": PlannedFamily(
        matrices=(*_QKVO, *_GATED[1:]), biased=_LLAMA_BIAS, activation=("hidden_act", "relu2"), shared_axes=_BOTH
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE, slicing=SlicingRule(windows="layers", logits=("multiplied", "logit_scale")), head_norm=None
    ),
    "ernie4_5": PlannedFamily(
        biased=_bias_everywhere(("use_bias", False)),
        tied=True,
        shared_axes=_BOTH,
        defaults={"num_key_value_heads": 2, "head_dim": 128},
    ),
    "exaone4": PlannedFamily(
        SlicingRule(windows="layers"),
        head_norm=(True, "head"),
        shared_axes=_CP,
        defaults={"num_key_value_heads": 32},
    ),
    "flex_olmo": replace(
        _QK_NORMED,
        matrices=_QKVO,
        shared_axes=frozenset(),
        experts=replace(
            _OLMOE_EXPERTS,
            width=("intermediate_size", 11008),
            count=7,
            asked=("num_experts_per_tok", 5),
        ),
    ),
    "gemma": _GEMMA,
    "gemma2": replace(
        _LATER_GEMMA,
        slicing=SlicingRule(windows="layers", scaled_embedding=True, logits=_CAPPED, plain_attention=True),
        shared_axes=frozenset(),
    ),
    "gemma3_text": replace(
        _LATER_GEMMA,
        slicing=SlicingRule(
            windows="layers",
            rotary_by_type=True,
            scaled_embedding=True,
            logits=_CAPPED,
            refused=(("use_bidirectional_attention", False),),
        ),
        head_norm=(True, "head"),
    ),
    "glm": PlannedFamily(
        matrices=_QKVO + _FUSED_GATE,
        biased={"first": ("attention_bias", True)},
        shared_axes=_CP,
        defaults={"num_key_value_heads": 2, "head_dim": 128},
    ),
    "gpt_neox": PlannedFamily(
        SlicingRule("gpt_neox", past_key="layer_past", stored_names=(("lm_head.weight", "embed_out.weight"),)),
        matrices=(
            ("attention.query_key_value", "first", "all"),
            ("attention.dense", "mixed", "stream"),
            ("mlp.dense_h_to_4h", "second", "inner"),
            ("mlp.dense_4h_to_h", "inner", "stream"),
        ),
        adapter_targets=("query_key_value",),
        biased=_bias_of_attention(("attention_bias", True)) | {"second": True, "inner": True},
        norm_weights=2,
        activation=("hidden_act", "gelu"),
        rms=False,
        heads_first=True,
        shared_axes=_BOTH,
    ),
    "granite": PlannedFamily(
        SlicingRule(embedding_factor="embedding_multiplier", logits=("divided", "logits_scaling")),
        biased=_LLAMA_BIAS,
        shared_axes=_BOTH,
    ),
    "helium": PlannedFamily(
        biased={"first": _ATTENTION_BIAS, "second": _MLP_BIAS, "inner": _MLP_BIAS},
        shared_axes=_BOTH,
        defaults={"num_key_value_heads": 20, "head_dim": 128},
    ),
    "mistral": PlannedFamily(SlicingRule(windows="config"), shared_axes=_BOTH, defaults={"num_key_value_heads": 8}),
    "mixtral": PlannedFamily(
        SlicingRule(windows="config", refused=(("router_jitter_noise", 0.0),)),
        matrices=_QKVO,
        shared_axes=_TP,
        defaults={"num_key_value_heads": 8},
        experts=ExpertsRule(
            width=("intermediate_size", 14336),
            count=8,
            asked=("num_experts_per_tok", 2),
            block="block_sparse_moe",
            pieces=("w1", "w3", "w2"),
        ),
    ),
    "olmo": replace(_OLMO, norm_weights=0, shared_axes=_BOTH),
    "olmo2": _QK_NORMED,
    "olmo3": replace(_QK_NORMED, slicing=SlicingRule(windows="layers", rotary_by_type=True)),
    "olmoe": replace(
        _QK_NORMED,
        slicing=SlicingRule(plan=(("embed_tokens",), "layers", ("norm",))),
        matrices=_QKVO,
        shared_axes=frozenset(),
        experts=_OLMOE_EXPERTS,
    ),
    "phi": PlannedFamily(
        matrices=(
            *_QKVO[:3],
            ("self_attn.dense", "mixed", "stream"),
            ("mlp.fc1", "second", "inner"),
            ("mlp.fc2", "inner", "stream"),
        ),
        biased=_bias_everywhere(True),
        norms=1,
        norm_weights=2,
        head_norm=(("qk_layernorm", False), "head"),
        activation=("hidden_act", "gelu_new"),
        head_bias=True,
        rms=False,
        shared_axes=_CP,
    ),
    "phi3": PlannedFamily(
        SlicingRule(windows="config"),
        matrices=(("self_attn.o_proj", "mixed", "stream"), ("self_attn.qkv_proj", "first", "all"), *_FUSED_GATE),
        adapter_targets=("qkv_proj",),
        shared_axes=_CP,
    ),
    "qwen2": PlannedFamily(
        SlicingRule(windows="layers"),
        biased={"first": True},
        shared_axes=_BOTH,
        defaults={"num_key_value_heads": 32},
    ),
    "qwen2_moe": PlannedFamily(
        SlicingRule(windows="layers"),
        matrices=_QKVO,
        biased={"first": ("qkv_bias", True)},
        shared_axes=_TP,
        defaults={"num_key_value_heads": 16},
        experts=replace(
            _QWEN_EXPERTS,
            width=("moe_intermediate_size", 1408),
            count=60,
            asked=("num_experts_per_tok", 4),
            shared=("shared_expert_intermediate_size", 5632),
        ),
    ),
    "qwen3": PlannedFamily(
        SlicingRule(windows="layers"),
        biased=_bias_of_attention(_ATTENTION_BIAS),
        head_norm=(True, "head"),
        shared_axes=_BOTH,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_moe": PlannedFamily(
        SlicingRule(refused=(("use_sliding_window", False),), further_keys=("head_dim",)),
        matrices=_QKVO,
        biased=_bias_of_attention(_ATTENTION_BIAS),
        head_norm=(True, "head"),
        shared_axes=_TP,
        defaults={"num_key_value_heads": 4},
        experts=_QWEN_EXPERTS,
    ),
    "seed_oss": PlannedFamily(
        biased={
            "first": ("attention_bias", True),
            "mixed": ("attention_out_bias", False),
            "second": _MLP_BIAS,
            "inner": _MLP_BIAS,
        },
        shared_axes=_BOTH,
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "smollm3": PlannedFamily(
        SlicingRule(windows="layers"),
        biased=_LLAMA_BIAS,
        tied=True,
        shared_axes=_BOTH,
        defaults={"num_key_value_heads": 4},
    ),
    "starcoder2": PlannedFamily(
        SlicingRule(windows="config", embedding_dropout="embedding_dropout"),
        matrices=(*_QKVO, ("mlp.c_fc", "second", "inner"), ("mlp.c_proj", "inner", "stream")),
        biased=_bias_everywhere(("use_bias", True)),
        norm_weights=2,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        tied=True,
        rms=False,
        shared_axes=_BOTH,
        defaults={"num_key_value_heads": 2},
    ),
}
"""By the hub's ``model_type``; each line is admitted by the test that its stages give the bits of the whole model."""

LLAMA = replace(PlannedFamily(biased=_LLAMA_BIAS, shared_axes=_BOTH).family_facts, slicing=None)
"""Counted as the others are; its stages have a file of their own, `phalanx.models.written.llama`."""
