"""A model family: one data object, in a separate file of this folder.

`Structure` describes what all models of the family share (kinds of norms, biases, activation). The differences between two
models of a family (dims, windows, RoPE's numbers) are fields of `Shape`. `read` and `write` translate between Hugging Face's
config.json
and those fields; `names`, `joined` and `transposed` say how the weights are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rush.models.shape import Shape

Config = Mapping[str, Any]
"""The content of a config.json."""
Fields = dict[str, Any]
"""Fields of a `Shape`, without the family."""


@dataclass(frozen=True)
class Structure:
    """What the blocks of a family have. The defaults are Llama's."""

    norm: Literal["rms", "layer"] = "rms"
    norm_position: Literal["before", "after", "both"] = "before"
    """Where a sublayer has its norms."""
    norm_offset: bool = False
    """RMSNorm multiplies by 1 + weight (the file holds the weight minus 1), in fp32."""
    norm_rounds_last: bool = False
    """RMSNorm multiplies by its weight in fp32 and rounds then; Llama rounds before."""
    learned_positions: bool = False
    """Learned position embeddings instead of RoPE."""
    joined_qkv: bool = False
    """Queries, keys and values are one layer of the model itself."""
    biases: Literal["none", "qkv", "all"] = "none"
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of queries and keys: of each head, or of all heads together."""
    gated_mlp: bool = True
    activation: Literal["silu", "gelu"] = "silu"
    embedding_by_width: bool = False
    """Embeddings are multiplied by sqrt(hidden), rounded to the dtype of the weights."""
    scaled_outputs: bool = False
    """Initially, the layers that write to the residual stream are smaller by 1/sqrt(2·layers)."""


@dataclass(frozen=True)
class Family:
    """One model_type of Hugging Face's transformers."""

    name: str
    """The model_type."""
    title: str
    """As people write it."""
    architecture: str
    """The class in config.json's `architectures` that has the LM head."""
    read: Callable[[Config], Fields]
    write: Callable[[Shape], dict[str, Any]]
    names: Mapping[str, str]
    """Our modules and their names in a file; those of a block without its number."""
    structure: Structure = field(default_factory=Structure)
    supported: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Settings that change the result: the supported values, the library's default first."""
    also: tuple[str, ...] = ()
    """Further model_types that are read as this family."""
    accepted: tuple[str, ...] = ()
    """Further names that `architectures` may have."""
    prefixes: tuple[str, ...] = ("model.",)
    """Prefixes of the base model's tensors: rush writes the first; files may have any of them, or none."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stored modules whose rows are those of several of ours, in this order."""
    transposed: bool = False
    """Linear weights are stored as [in, out]."""
    ignored: tuple[str, ...] = ()
    """Beginnings of names that belong to other parts of the model, such as its vision tower."""
