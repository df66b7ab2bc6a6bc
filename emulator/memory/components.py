"""Names under which people sum memory: the model's parts, whatever the layer."""

from fnmatch import fnmatchcase
from functools import cache

from emulator.layout.plan import module_pattern

_COMPONENTS = (  # module pattern -> component, the first match wins
    ("*.mlp.experts.*", "routed_experts"),
    ("*.mlp.shared_experts.*", "shared_experts"),
    ("*.mlp.gate", "router_gate"),
    ("*.mlp.*", "dense_mlp"),
    ("*norm", "norms"),
    ("*.indexer.wq_b", "indexer_wq_b"),
    ("*.indexer.*", "indexer_wk_weights_proj"),
    ("*rotary_emb", "rope_cache"),
)


def component_of(module: str) -> str:
    """routed_experts, norms, q_b_proj, ...: by pattern, else the module's own last name."""
    return _component(module_pattern(module))


@cache
def _component(pattern: str) -> str:
    return next((c for p, c in _COMPONENTS if fnmatchcase(pattern, p)), pattern.rpartition(".")[2])
