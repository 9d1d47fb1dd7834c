"""What the planner must know of a model: its sizes and exact parameter counts, from the hub's config.json alone."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import ModelError

_OPT_OFFSET = 2
"""Rows of OPT's position table beyond its positions."""

_SAVED_BY_ACTIVATION = {"relu": 1, "gelu": 2, "gelu_pytorch_tanh": 2, "silu": 2, "swish": 2, "gelu_new": 5}
"""Inner tensors that stay for the backward pass: a fused kernel's input and output; the parts of one that is composed.
relu is told from its output alone."""
_DROPOUT, _USUAL_DROPOUT = {"gpt2": ("attn_pdrop", 0.1)}, ("attention_dropout", 0.0)
"""Where a config has attention's dropout, with transformers' default."""
_COMPOSED, _FUSED = "gelu_new", "gelu_pytorch_tanh"
"""One function: of many kernels, and of one."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only language model; all counts are exact.

    Attributes:
        family: The hub's ``model_type``.
        layers: Blocks.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        ffn: Inner width of an MLP.
        vocab: Rows of the embedding.
        max_positions: Longest sequence in tokens; None where positions are computed.
        gated: The MLP has a gate: three matrices instead of two.
        tied: The head shares the embedding's matrix.
        ffn_saved: Tensors of the MLP's inner width that a block keeps for its backward pass.
        ffn_composed: Of them, those that are there because the activation function is composed of many kernels.
        fused: The family can run an attention kernel that keeps no scores.
        layer_matrix: Parameters of one block's matrices.
        layer_split: Parameters of one block that tensor parallel shares: matrices and biases of columns.
        layer_whole: Parameters of one block that every tensor parallel rank has: norms and biases of rows.
        embedding: Parameters of token and position tables, with norms and projections next to them.
        final: Parameters between the last block and the head.
        head: Parameters of an untied head; 0 where it is tied.
        head_matrix: Parameters that the head multiplies with, tied or not.
        attention_dropout: Share of attention's weights that training drops.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int | None
    gated: bool
    tied: bool
    ffn_saved: int
    ffn_composed: int
    fused: bool
    layer_matrix: int
    layer_split: int
    layer_whole: int
    embedding: int
    final: int
    head: int
    head_matrix: int
    attention_dropout: float = 0.0

    @property
    def layer(self) -> int:
        """Parameters of one block."""
        return self.layer_split + self.layer_whole

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return self.layers * self.layer + self.embedding + self.final + self.head


def read_shape(path: Path) -> ModelShape:
    """Read the shape of a model.

    Args:
        path: A config.json in the hub's form, or the directory that holds one.

    Raises:
        ModelError: It is missing, not JSON, of an unknown family, or lacks a size.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ModelError(f"{path}: cannot be read ({exc.strerror}); give a model's config.json") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: is not valid JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise ModelError(f"{path}: found a {type(data).__name__}; expected an object")
    return shape_of(data, str(path))


def shape_of(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """Return the shape that a hub config describes.

    Args:
        config: The keys of a config.json, ``model_type`` included.
        where: File or section for the messages.

    Raises:
        ModelError: The family is unknown, or a size is missing or no positive whole number.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _READERS:
        raise ModelError(f"{where}: model_type: found {family!r}; expected one of {', '.join(sorted(_READERS))}")
    keys = _Keys(config, where)
    return replace(_READERS[family](keys), attention_dropout=keys.share(*_DROPOUT.get(family, _USUAL_DROPOUT)))


class _Keys:
    """A config's values, each checked when it is taken."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first of the names that is there and not null."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelError(f"{self._where}: {name}: found {value!r}; expected a whole number of at least 1")
            return value
        if default is None:
            raise ModelError(f"{self._where}: {names[0]}: missing; add it")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self._config.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self._where}: {name}: found {value!r}; expected true or false")
        return value

    def share(self, name: str, default: float) -> float:
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ModelError(f"{self._where}: {name}: found {value!r}; expected a number from 0 to 1")
        return float(value)

    def saved(self, name: str, default: str) -> int:
        """Return how many inner tensors the activation function named there keeps; the most for an unknown one."""
        return _SAVED_BY_ACTIVATION.get(str(self._config.get(name) or default), max(_SAVED_BY_ACTIVATION.values()))

    def composed(self, name: str, default: str) -> int:
        """Return how many of them one kernel would not keep."""
        is_composed = str(self._config.get(name) or default) == _COMPOSED
        return _SAVED_BY_ACTIVATION[_COMPOSED] - _SAVED_BY_ACTIVATION[_FUSED] if is_composed else 0

    def heads(self, hidden: int, *names: str) -> tuple[int, int]:
        """Return the number of heads and the width of one."""
        heads = self.size(*names)
        if hidden % heads and self._config.get("head_dim") is None:
            raise ModelError(
                f"{self._where}: hidden size {hidden} is no multiple of {heads} attention heads; change one of them"
            )
        return heads, hidden // heads


def _gpt2(keys: _Keys) -> ModelShape:
    hidden, vocab = keys.size("n_embd", "hidden_size"), keys.size("vocab_size")
    heads, head_dim = keys.heads(hidden, "n_head", "num_attention_heads")
    positions = keys.size("n_positions", "max_position_embeddings")
    return _plain(
        "gpt2",
        layers=keys.size("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        ffn=keys.size("n_inner", default=4 * hidden),
        vocab=vocab,
        max_positions=positions,
        tied=keys.flag("tie_word_embeddings", True),
        tables=(vocab + positions) * hidden,
        final=2 * hidden,
        saved=keys.saved("activation_function", "gelu_new"),
        composed=keys.composed("activation_function", "gelu_new"),
    )


def _opt(keys: _Keys) -> ModelShape:
    hidden, vocab = keys.size("hidden_size"), keys.size("vocab_size")
    heads, head_dim = keys.heads(hidden, "num_attention_heads")
    positions = keys.size("max_position_embeddings")
    narrow = keys.size("word_embed_proj_dim", default=hidden)
    project = 0 if narrow == hidden else narrow * hidden
    affine = keys.flag("layer_norm_elementwise_affine", True)
    last_norm = keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm", False)
    return _plain(
        "opt",
        layers=keys.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        ffn=keys.size("ffn_dim"),
        vocab=vocab,
        max_positions=positions,
        tied=keys.flag("tie_word_embeddings", True),
        tables=vocab * narrow + (positions + _OPT_OFFSET) * hidden + project,
        final=project + (2 * hidden if last_norm and affine else 0),
        biased=keys.flag("enable_bias", True),
        norms=4 * hidden if affine else 0,
        features=narrow,
        saved=keys.saved("activation_function", "relu"),
    )


def _bloom(keys: _Keys) -> ModelShape:
    hidden, vocab = keys.size("hidden_size", "n_embed"), keys.size("vocab_size")
    heads, head_dim = keys.heads(hidden, "n_head", "num_attention_heads")
    return _plain(
        "bloom",
        layers=keys.size("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        ffn=4 * hidden,
        vocab=vocab,
        max_positions=None,
        tied=keys.flag("tie_word_embeddings", True),
        tables=vocab * hidden + 2 * hidden,
        final=2 * hidden,
        saved=2,
        fused=False,
    )


def _plain(
    family: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    max_positions: int | None,
    tied: bool,
    tables: int,
    final: int,
    saved: int,
    composed: int = 0,
    fused: bool = True,
    biased: bool = True,
    norms: int | None = None,
    features: int | None = None,
) -> ModelShape:
    """Return a shape with one key and value head for each query head and an MLP without a gate."""
    matrix = 4 * hidden * hidden + 2 * hidden * ffn
    head_matrix = vocab * (features or hidden)
    return ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        max_positions=max_positions,
        gated=False,
        tied=tied,
        ffn_saved=saved,
        ffn_composed=composed,
        fused=fused,
        layer_matrix=matrix,
        layer_split=matrix + (3 * hidden + ffn if biased else 0),
        layer_whole=(2 * hidden if biased else 0) + (4 * hidden if norms is None else norms),
        embedding=tables,
        final=final,
        head=0 if tied else head_matrix,
        head_matrix=head_matrix,
    )


def _llama(keys: _Keys) -> ModelShape:
    hidden, vocab, ffn = keys.size("hidden_size"), keys.size("vocab_size"), keys.size("intermediate_size")
    heads, head_dim = keys.heads(hidden, "num_attention_heads")
    head_dim = keys.size("head_dim", default=head_dim)
    kv_heads = keys.size("num_key_value_heads", default=heads)
    queries, shared = heads * head_dim, kv_heads * head_dim
    matrix = 2 * hidden * queries + 2 * hidden * shared + 3 * hidden * ffn
    attention_bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    tied = keys.flag("tie_word_embeddings", False)
    return ModelShape(
        family="llama",
        layers=keys.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        max_positions=None,
        gated=True,
        tied=tied,
        ffn_saved=keys.saved("hidden_act", "silu") + 2,
        ffn_composed=0,
        fused=True,
        layer_matrix=matrix,
        layer_split=matrix + (queries + 2 * shared if attention_bias else 0) + (2 * ffn if mlp_bias else 0),
        layer_whole=2 * hidden + (hidden if attention_bias else 0) + (hidden if mlp_bias else 0),
        embedding=vocab * hidden,
        final=hidden,
        head=0 if tied else vocab * hidden,
        head_matrix=vocab * hidden,
    )


_READERS: dict[str, Callable[[_Keys], ModelShape]] = {"bloom": _bloom, "gpt2": _gpt2, "llama": _llama, "opt": _opt}
