"""The configuration of a model and its adapters; imports no torch."""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from phalanx.config import StrictModel
from phalanx.config.strict import check_reference, later_key
from phalanx.errors import ConfigError
from phalanx.planner import Adapter
from phalanx.planner.model.adapter import PlannedPrompt, PromptEncoding
from phalanx.planner.model.shape import HeadKind

PACKAGED_MODELS = ("smollm2-135m",)

Attention = Literal["sdpa", "eager"]
Quantization = Literal["nf4", "int8"]
AttentionKind = Literal["causal", "prefix", "bidirectional", "documents"]


class LoraConfig(StrictModel):
    """Low-rank adapters on linear layers inside the blocks; the model's own weights stay frozen.

    Attributes:
        kind: ``lora``, which may be left out.
        rank: Inner dimension of the adapter.
        alpha: Scale; the adapter's output is multiplied by ``alpha / rank``.
        dropout: Probability of dropping an input of the adapter.
        targets: Names of linear layers, such as ``q_proj`` or ``mlp.c_proj``; empty means the
            family's usual attention projections.
        dora: Learn the size of each output's weights beside their direction (Liu et al. 2024).
        rslora: Multiply the output by ``alpha / sqrt(rank)`` instead, so that high ranks learn as low ones do
            (Kalajdzievski 2023).
        quantize: Keep the frozen matrices of the blocks in 4 bits (``nf4``) or 8 (``int8``); not with `dora`.
        path: A directory in peft's format; training begins with its values instead of new ones.
    """

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16, gt=0, allow_inf_nan=False)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: tuple[str, ...] = ()
    dora: bool = later_key(False)
    rslora: bool = later_key(False)
    quantize: Quantization | None = later_key(None)
    path: str | None = later_key(None, min_length=1)

    @model_validator(mode="after")
    def _check_targets(self) -> "LoraConfig":
        if len(set(self.targets)) != len(self.targets) or not all(self.targets):
            raise ValueError(f"targets: found {list(self.targets)}; expected names, each once and none empty")
        if self.quantize is not None and self.dora:
            raise ValueError("quantize: DoRA reads the size of frozen weights, which are few bits; set dora = false")
        return self

    @property
    def planner_adapter(self) -> Adapter:
        """As the planner has it."""
        return Adapter(self.rank, self.targets, drops=self.dropout > 0, dora=self.dora)


class SpfConfig(StrictModel):
    """Sparsification parameter fine-tuning: the attention heads and feed-forward rows that weigh most are trained.

    Heads of q, k and v, and rows of the first feed-forward matrices, are ranked by the L1 norm of their weights, each
    matrix of each layer by itself.

    Attributes:
        kind: ``spf``.
        share: Trained share of the heads, and of the rows; rounded up.
    """

    kind: Literal["spf"]
    share: float = Field(default=0.5, gt=0, le=1, allow_inf_nan=False)


class PrefixConfig(StrictModel):
    """P-tuning v2: keys and values of virtual tokens, of each layer its own, in front of every sequence.

    Attributes:
        kind: ``ptuning``.
        tokens: Virtual tokens; where positions are learned, sequences may be shorter by so many.
        path: A directory in peft's format (prefix tuning); training begins with its values instead of new ones.
    """

    kind: Literal["ptuning"]
    tokens: int = Field(default=16, ge=1, le=1024)
    path: str | None = later_key(None, min_length=1)

    @property
    def planner_adapter(self) -> Adapter:
        """As the planner has it."""
        return Adapter(0, virtual_tokens=self.tokens)


class PromptEncoderConfig(StrictModel):
    """P-tuning: embeddings of virtual tokens before every text, made by an encoder that is trained with them.

    Attributes:
        kind: ``prompt_encoder``.
        tokens: Virtual tokens; rows are longer by so many, and cross boundaries so.
        encoder: ``mlp``, as peft's; ``lstm``, as Liu et al. 2021; ``none`` trains the embeddings themselves, which is
            prompt tuning.
        encoder_size: Width of the encoder's hidden layers; that of the model when left out.
        path: A directory in peft's format (P-tuning, prompt tuning); training begins with its embeddings instead of new
            ones. It holds what an encoder made and not the encoder, so with ``none`` alone.
    """

    kind: Literal["prompt_encoder"]
    tokens: int = Field(default=16, ge=1, le=1024)
    encoder: PromptEncoding = "mlp"
    encoder_size: int | None = Field(default=None, ge=1, le=1 << 16)
    path: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _check_encoder(self) -> "PromptEncoderConfig":
        if self.encoder == "none" and self.encoder_size is not None:
            raise ValueError('encoder_size: encoder = "none" has no layers; remove it')
        if self.path is not None and self.encoder != "none":
            raise ValueError(
                "path: files of peft hold the embeddings that an encoder made, and not the encoder; set encoder = "
                '"none", or resume the run that has it'
            )
        return self

    @property
    def planner_adapter(self) -> Adapter:
        """As the planner has it."""
        return Adapter(0, prompt=PlannedPrompt(self.tokens, self.encoder, self.encoder_size))


def _kind_of(value: object) -> object:
    return value.get("kind", "lora") if isinstance(value, dict) else getattr(value, "kind", None)


AdapterConfig = Annotated[
    Annotated[LoraConfig, Tag("lora")]
    | Annotated[SpfConfig, Tag("spf")]
    | Annotated[PrefixConfig, Tag("ptuning")]
    | Annotated[PromptEncoderConfig, Tag("prompt_encoder")],
    Discriminator(_kind_of),
]
"""What is trained while the model's own weights stay as they are."""

SlicedAdapter = Annotated[
    Annotated[LoraConfig, Tag("lora")]
    | Annotated[PrefixConfig, Tag("ptuning")]
    | Annotated[PromptEncoderConfig, Tag("prompt_encoder")],
    Discriminator(_kind_of),
]
"""An adapter of which a stage knows its part from shapes alone, so that parties without weights can build it."""


def without_path(adapter: SlicedAdapter | None) -> SlicedAdapter | None:
    """Return an adapter as other parties are told of it: where its first values lie is the owner's own affair."""
    return None if adapter is None else adapter.model_copy(update={"path": None})


def rows_before(adapter: AdapterConfig | None) -> int:
    """Return by how many rows of virtual tokens what crosses between stages is longer than the text."""
    return adapter.tokens if isinstance(adapter, PromptEncoderConfig) else 0


class ModelConfig(StrictModel):
    """The source of a model; exactly one of ``path``, ``name`` and ``architecture`` gives it.

    Attributes:
        path: Local directory in the hub's layout: config.json, safetensors, tokenizer.json.
        from_scratch: Draw random weights for ``architecture``, or for the config.json in ``path``.
        architecture: The hub's config keys, ``model_type`` included.
        adapter: Train this only; without it every weight is trained.
        activation_checkpointing: Recompute each block in the backward pass instead of keeping
            its activations.
        attention: Kernel; a family without ``sdpa`` (bloom, gemma2) uses ``eager``.
        family: Code of the user's own that cuts the model into stages, where no family here does.
        layers: Use the first so many blocks alone, with embedding, last norm and head; all when left out.
        head: Output of the last stage for each token: ``lm``, a logit of each word; ``score``, one number, as of a
            reward model; ``lm_and_score``, both side by side, the number last. As in the files when left out.
    """

    path: str | None = None
    name: str | None = None
    from_scratch: bool = False
    architecture: dict[str, str | int | float | bool | None] | None = None
    adapter: AdapterConfig | None = None
    activation_checkpointing: bool = False
    attention: Attention = "sdpa"
    family: Annotated[str, AfterValidator(check_reference)] | None = later_key(None)
    layers: int | None = Field(default=None, ge=1)
    head: HeadKind | None = later_key(None)

    @model_validator(mode="after")
    def _check_origin(self) -> "ModelConfig":
        sources = [key for key in ("path", "name", "architecture") if getattr(self, key) is not None]
        if len(sources) != 1:
            raise ValueError(
                f"found {' and '.join(sources) or 'none of path, name, architecture'}; "
                "expected exactly one of path, name, architecture"
            )
        if self.path == "":
            raise ValueError("path: is empty; give a directory in the hub's layout")
        if self.name is not None and self.name not in PACKAGED_MODELS:
            raise ValueError(f"name: found {self.name!r}; choices: {', '.join(PACKAGED_MODELS)}")
        if self.from_scratch and self.name is not None:
            raise ValueError("from_scratch: a packaged model has weights; give architecture or path instead of name")
        if self.architecture is not None and not self.from_scratch:
            raise ValueError("architecture: has no weights; set from_scratch = true, or give path or name")
        if self.architecture is not None and not isinstance(self.architecture.get("model_type"), str):
            raise ValueError('architecture: model_type is missing; add for example model_type = "gpt2"')
        return self

    @property
    def planned_adapter(self) -> Adapter | None:
        """Return the planner's view of the adapter; None for all weights, and for kinds unknown to the planner."""
        return None if self.adapter is None or isinstance(self.adapter, SpfConfig) else self.adapter.planner_adapter

    @property
    def base_quantization(self) -> Quantization | None:
        """What the frozen matrices beside an adapter are kept in; None for float32."""
        return self.adapter.quantize if isinstance(self.adapter, LoraConfig) else None

    @property
    def adapter_directory(self) -> str | None:
        """Where the adapter's first values lie; None where a seed draws them."""
        return None if self.adapter is None or isinstance(self.adapter, SpfConfig) else self.adapter.path

    @property
    def sliced_adapter(self) -> LoraConfig | PrefixConfig | PromptEncoderConfig | None:
        """The adapter, for engines that build stages without weights."""
        if isinstance(self.adapter, SpfConfig):
            raise ConfigError(
                'model.adapter.kind = "spf": its rows are chosen by weights, and this engine builds stages without '
                'any; set kind = "lora", "ptuning" or "prompt_encoder"'
            )
        return self.adapter
