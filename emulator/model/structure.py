"""DSA structure detection: by the fields that make the structure, never by model_type."""

from collections.abc import Mapping
from typing import Any

# low-rank query and latent projections (MLA) and a lightning indexer with a top-k
DSA_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
)


def missing_dsa_fields(config: Any) -> list[str]:
    """Names of the DSA fields that an HF config (mapping or object) lacks or sets to zero or null."""
    given: Mapping[str, Any] = config if isinstance(config, Mapping) else {n: getattr(config, n, 0) for n in DSA_FIELDS}
    return [name for name in DSA_FIELDS if not isinstance(given.get(name), int) or given[name] <= 0]


def has_dsa_structure(config: Any) -> bool:
    """Whether an HF config (mapping, or object with attributes) has DeepSeek-style sparse attention."""
    return not missing_dsa_fields(config)
