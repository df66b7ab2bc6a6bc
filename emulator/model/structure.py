"""MLA and DSA structure detection: by the fields that make the structure, never by model_type."""

from collections.abc import Mapping, Sequence
from typing import Any

MLA_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
INDEXER_FIELDS = ("index_topk", "index_n_heads", "index_head_dim")
DSA_FIELDS = MLA_FIELDS + INDEXER_FIELDS


def missing_fields(config: Any, names: Sequence[str] = DSA_FIELDS) -> list[str]:
    """Which of these fields an HF config (mapping or object) lacks or sets to zero or null."""
    given: Mapping[str, Any] = config if isinstance(config, Mapping) else {n: getattr(config, n, 0) for n in names}
    return [name for name in names if not isinstance(given.get(name), int) or given[name] <= 0]


def has_mla_structure(config: Any) -> bool:
    """Whether an HF config (mapping, or object with attributes) has low-rank query and latent projections."""
    return not missing_fields(config, MLA_FIELDS)


def has_dsa_structure(config: Any) -> bool:
    """Whether it also has a lightning indexer with a top-k: DeepSeek-style sparse attention."""
    return not missing_fields(config)
