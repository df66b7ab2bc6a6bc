"""Model configuration: what the Program needs of an HF config.json, validated."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, model_validator

from emulator import profiles
from emulator.errors import UsageError, first_problem
from emulator.model.structure import INDEXER_FIELDS, MLA_FIELDS, has_dsa_structure, has_mla_structure, missing_fields

HF_LATENT_NORM_EPS = 1e-6  # HF builds q_a/kv_a_layernorm with the class default, whatever the config says

_SHARED_DEFAULTS = {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3}
_DEEPSEEK_DEFAULTS = {**_SHARED_DEFAULTS, "rms_norm_eps": 1e-6, "n_group": 8, "topk_group": 4}
HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {**_SHARED_DEFAULTS, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1},
    "deepseek_v32": _DEEPSEEK_DEFAULTS,
    "deepseek_v3": _DEEPSEEK_DEFAULTS,
}


class RopeParameters(BaseModel):
    """Rotary settings, in HF's rope_parameters form. Only `default` and `yarn` exist in this family."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    rope_type: Literal["default", "yarn"] = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


class ModelConfig(BaseModel):
    """An MLA model's sizes and options, under the names of HF's config.json. index_*: of the lightning indexer, all 0
    where there is none (dense MLA)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_type: str = "unknown"
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    n_shared_experts: PositiveInt = 1
    n_routed_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    routed_scaling_factor: float
    norm_topk_prob: bool = True
    n_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    first_k_dense_replace: int | None = None
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None
    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    rope_interleave: bool | None = True
    index_topk: NonNegativeInt = 0
    index_n_heads: NonNegativeInt = 0
    index_head_dim: NonNegativeInt = 0
    indexer_rope_interleave: bool | None = None
    indexer_types: tuple[Literal["full", "shared"], ...] | None = None
    index_topk_pattern: str | tuple[Literal["full", "shared"], ...] | None = None
    index_topk_freq: PositiveInt = 1
    index_skip_topk_offset: int = 2
    attention_bias: bool = False
    rms_norm_eps: float
    rope_parameters: RopeParameters = RopeParameters()

    @model_validator(mode="before")
    @classmethod
    def _hf_defaults(cls, data: Any) -> Any:
        """A field that a config of a known class omits has that class's default in HF."""
        if not isinstance(data, dict):
            return data
        return {**HF_DEFAULTS.get(str(data.get("model_type")), {}), **data}

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        """A null field of the indexer is one that is not there."""
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k not in INDEXER_FIELDS}

    @model_validator(mode="before")
    @classmethod
    def _fold_legacy_rope(cls, data: Any) -> Any:
        """Older configs carry rope_theta and rope_scaling {type: yarn}; HF folds them in the same way."""
        if isinstance(data, dict) and not data.get("rope_parameters"):
            scaling = data.get("rope_scaling") or {}
            if not isinstance(scaling, dict):
                raise ValueError(f"rope_scaling is {scaling!r}, expected a table")
            rope = dict(scaling)
            rope.setdefault("rope_type", rope.pop("type", "default"))
            rope["rope_theta"] = data.get("rope_theta", 10000.0)
            data = {**data, "rope_parameters": rope}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> "ModelConfig":
        if self.first_k_dense_replace is None and self.mlp_layer_types is None:
            raise ValueError("first_k_dense_replace or mlp_layer_types must say which layers are dense")
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(f"n_group {self.n_group} must divide n_routed_experts and be at least topk_group")
        if self.n_routed_experts // self.n_group < 2:
            raise ValueError(f"n_group {self.n_group} leaves one expert a group, which is scored by its two best")
        missing = missing_fields(self, INDEXER_FIELDS)
        if 0 < len(missing) < len(INDEXER_FIELDS):
            raise ValueError(f"half an indexer: missing or zero fields {', '.join(missing)}")
        if self.qk_rope_head_dim % 2 or (not missing and self.qk_rope_head_dim > self.index_head_dim):
            raise ValueError("qk_rope_head_dim must be even and at most index_head_dim")
        if self.num_experts_per_tok > self.n_routed_experts // self.n_group * self.topk_group:
            raise ValueError("num_experts_per_tok exceeds the experts that the selected groups hold")
        for name in ("mlp_layer_types", "indexer_types", "index_topk_pattern"):
            types = getattr(self, name)
            if types is not None and len(types) < self.num_hidden_layers:
                raise ValueError(f"{name} has {len(types)} entries for {self.num_hidden_layers} layers")
        rope = self.rope_parameters
        if rope.rope_type == "yarn" and rope.original_max_position_embeddings is None:
            raise ValueError("rope_parameters: yarn needs original_max_position_embeddings")
        if not missing and not self.has_indexer(0):
            raise ValueError("layer 0 shares the top-k of a previous layer, but there is none")
        return self

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_interleaved(self) -> bool:
        """Pairing of the attention's rope: a choice of dense MLA; HF's DSA classes always interleave."""
        return bool(self.rope_interleave) or has_dsa_structure(self)

    @property
    def indexer_interleaved(self) -> bool:
        """Pairing of the indexer's rope. HF hard-codes it by class: interleaved for glm_moe_dsa, half-split
        for deepseek_v32; another model_type says it with indexer_rope_interleave (default: half-split)."""
        if self.model_type == "glm_moe_dsa":
            return True
        return bool(self.indexer_rope_interleave) and self.model_type != "deepseek_v32"

    def is_moe(self, layer: int) -> bool:
        """Whether a decoder layer has routed experts."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[layer] == "sparse"
        assert self.first_k_dense_replace is not None
        return layer >= self.first_k_dense_replace

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer runs its own indexer; others reuse the ids of the last layer that did (HF's order of
        precedence: indexer_types, index_topk_pattern, index_topk_freq with its offset). Dense MLA has none."""
        if not has_dsa_structure(self):
            return False
        if self.indexer_types is not None:
            return self.indexer_types[layer] == "full"
        if self.index_topk_pattern is not None:
            return self.index_topk_pattern[layer] in ("F", "full")
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def with_layers(self, num_layers: int | None) -> "ModelConfig":
        """The same model cut to `num_layers`: its first dense layers and MoE layers, at least one of each
        where the model has both and there is room."""
        if num_layers is None or num_layers == self.num_hidden_layers:
            return self
        if not 1 <= num_layers <= self.num_hidden_layers:
            raise UsageError(f"layers {num_layers}: allowed 1 to {self.num_hidden_layers}")
        kinds = ["sparse" if self.is_moe(i) else "dense" for i in range(self.num_hidden_layers)]
        num_dense = min(kinds.count("dense"), num_layers - 1 if "sparse" in kinds and num_layers > 1 else num_layers)
        cut = ("dense",) * num_dense + ("sparse",) * (num_layers - num_dense)
        return self.model_copy(update={"num_hidden_layers": num_layers, "mlp_layer_types": cut})

    def with_mtp_layers(self, added: int) -> "ModelConfig":
        """The same model with `added` multi-token-prediction layers after its own: MoE layers, with an indexer of their
        own where the model has indexers."""
        if not added:
            return self
        layers = range(self.num_hidden_layers)
        update: dict[str, Any] = {
            "num_hidden_layers": self.num_hidden_layers + added,
            "mlp_layer_types": tuple("sparse" if self.is_moe(i) else "dense" for i in layers) + ("sparse",) * added,
        }
        if has_dsa_structure(self):
            own = tuple("full" if self.has_indexer(i) else "shared" for i in layers)
            update["indexer_types"] = own + ("full",) * added
        return self.model_copy(update=update)

    def with_sizes(self, sizes: Mapping[str, int]) -> "ModelConfig":
        """The same structure with other sizes. UsageError for a field that is no size, or sizes that do not fit."""
        for name, value in sizes.items():
            if not isinstance(getattr(self, name, None), int) or isinstance(getattr(self, name), bool):
                raise UsageError(f"model_sizes: {name!r} is no size of the model")
            if value < 1:
                raise UsageError(f"model_sizes: {name} = {value}: a size is at least 1")
        try:
            return ModelConfig.model_validate({**self.model_dump(), **sizes})
        except ValidationError as error:
            raise UsageError(f"model_sizes: {first_problem(error)}") from None


def parse_config(data: dict[str, Any], where: str) -> ModelConfig:
    """ModelConfig from the content of an HF config.json.

    Raises UsageError, naming the missing or wrong fields, when the structure of MLA is not there.
    """
    if not has_mla_structure(data):
        missing = ", ".join(missing_fields(data, MLA_FIELDS))
        raise UsageError(f"{where}: no MLA structure (low-rank query and latent): missing or zero fields {missing}")
    try:
        return ModelConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{where}: {first_problem(error)}") from None


def model_folder(name: str) -> Path:
    """Folder of a model: a name under profiles/models or an HF model directory."""
    path = profiles.find("models", name)
    return path.parent if path.is_file() else path


def load_config(name: str) -> ModelConfig:
    """Reads the config.json of a model under profiles/models or of any HF model directory."""
    path = model_folder(name) / "config.json"
    try:
        data = json.loads(path.read_text())
    except OSError:
        raise UsageError(f"model {name!r}: {path} cannot be read") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid JSON ({error}); is the file cut short?") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return parse_config(data, str(path))
