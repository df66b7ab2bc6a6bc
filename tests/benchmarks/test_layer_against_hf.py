"""One MoE decoder layer against Hugging Face's eager one: time and peak memory, as ratios within one run.

Timings are printed and written to a file, never asserted; the outputs must agree. The file is
$EMULATOR_BENCH_OUT/layer_against_hf.json, or one in pytest's temporary folder.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from emulator.model.batch import Request
from emulator.model.config import parse_config
from emulator.model.decoder import DecoderLayer
from emulator.model.layers import ProgramOptions
from emulator.model.rope import inverse_frequencies
from emulator.model.workload import build_workload

THREADS = 2
TOKENS = (512, 1024, 2048, 4096)
REPEATS = {512: 15, 1024: 11, 2048: 7, 4096: 5}
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 512,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def hidden_states(tokens: int) -> Tensor:
    return torch.randn(tokens, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(tokens))


def random_state() -> dict[str, Tensor]:
    """HF's names and shapes -> random weights that keep activations near 1."""
    generator = torch.Generator().manual_seed(0)
    state = hf_layer(None).state_dict()
    for name, tensor in state.items():
        values = torch.randn(tensor.shape, generator=generator)
        scale = 0.1 if name.endswith("bias") else tensor.shape[-1] ** -0.5
        state[name] = 1 + 0.1 * values if tensor.dim() == 1 and name.endswith("weight") else values * scale
    return state


def hf_layer(state: dict[str, Tensor] | None) -> torch.nn.Module:
    config = transformers.DeepseekV32Config(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    config._attn_implementation = config._experts_implementation = "eager"
    cls = sys.modules[transformers.DeepseekV32Model.__module__].DeepseekV32DecoderLayer
    if state is None:
        with torch.device("meta"):
            return cls(config, 0)
    layer = cls(config, 0).eval()
    layer.load_state_dict(state)
    return layer


def hf_forward(state: dict[str, Tensor]) -> Callable[[int], Callable[[], Tensor]]:
    """tokens -> a function that runs HF's layer; mask and rotary table are made beforehand, as in HF's model."""
    layer = hf_layer(state)
    rotary = sys.modules[type(layer).__module__].DeepseekV32RotaryEmbedding(layer.self_attn.config)

    def prepare(tokens: int) -> Callable[[], Tensor]:
        x = hidden_states(tokens).unsqueeze(0)
        position_ids = torch.arange(tokens).unsqueeze(0)
        embeddings = rotary(x, position_ids)
        mask = torch.full((1, 1, tokens, tokens), torch.finfo(x.dtype).min).triu_(1)
        arguments = {"attention_mask": mask, "position_ids": position_ids, "position_embeddings": embeddings}
        return lambda: layer(x, **arguments)[0]

    return prepare


def our_forward(state: dict[str, Tensor]) -> Callable[[int], Callable[[], Tensor]]:
    """tokens -> a function that runs our layer on one prefill request; its caches are made beforehand."""
    config = parse_config(CONFIG, "benchmark")
    layer = DecoderLayer(config, 0, ProgramOptions())
    merged = ("experts.gate_up_proj", "experts.down_proj")
    layer.load_state_dict({n + ".weight" if n.endswith(merged) else n: t for n, t in state.items()}, assign=True)
    inv_freq, _ = inverse_frequencies(config)

    def prepare(tokens: int) -> Callable[[], Tensor]:
        x = hidden_states(tokens)
        made = build_workload(config, [[Request(tokens)]], seed=0, dp_index=0, dtype=x.dtype, block_size=16)
        batch = made.steps[0]

        def forward() -> Tensor:
            output, residual, _ = layer(x, None, None, inv_freq, batch)
            return output + residual

        return forward

    return prepare


FORWARDS = {"hf": hf_forward, "ours": our_forward}


@torch.no_grad()
def peak_extra_bytes(which: str, tokens: int) -> int:
    """Peak resident memory of this process during a forward, above what was resident before it."""
    torch.set_num_threads(THREADS)
    prepare = FORWARDS[which](random_state())
    prepare(64)()  # libraries' own buffers
    forward = prepare(tokens)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    forward()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":")]
    return int(line.split()[1]) * 1024


def measure_peak(which: str, tokens: int) -> int:
    """peak_extra_bytes in a fresh process, so that nothing freed earlier is reused."""
    command = [sys.executable, __file__, which, str(tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def _timed(forward: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    output = forward()
    return time.perf_counter() - start, output


@pytest.mark.benchmark
@pytest.mark.usefixtures("_threads")
@torch.no_grad()
def test_layer_against_hf(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    state = random_state()
    prepared = {which: make(state) for which, make in FORWARDS.items()}
    rows = []
    for tokens in TOKENS:
        forwards = {which: prepare(tokens) for which, prepare in prepared.items()}
        outputs = {which: forward() for which, forward in forwards.items()}  # warm-up
        assert outputs["hf"].shape[-2:] == (tokens, CONFIG["hidden_size"])
        error = float((outputs["hf"].view_as(outputs["ours"]) - outputs["ours"]).abs().max())
        assert error < 5e-6, f"{tokens} tokens: outputs differ by {error:.1e}"
        seconds: dict[str, list[float]] = {which: [] for which in forwards}
        for _ in range(REPEATS[tokens]):
            for which, forward in forwards.items():  # in turn, so that other load meets both
                seconds[which].append(_timed(forward)[0])
        medians = {which: statistics.median(values) for which, values in seconds.items()}
        peaks = {which: measure_peak(which, tokens) for which in forwards}
        rows.append(
            {
                "tokens": tokens,
                "hf_ms": medians["hf"] * 1e3,
                "ours_ms": medians["ours"] * 1e3,
                "speed_up": medians["hf"] / medians["ours"],
                "speed_up_best": min(seconds["hf"]) / min(seconds["ours"]),  # other load disturbs the medians
                "hf_peak_mb": peaks["hf"] / 1e6,
                "ours_peak_mb": peaks["ours"] / 1e6,
                "memory_ratio": peaks["ours"] / peaks["hf"],
                "largest_difference": error,
            }
        )

    folder = Path(os.environ.get("EMULATOR_BENCH_OUT") or tmp_path_factory.mktemp("benchmarks"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "layer_against_hf.json"
    path.write_text(json.dumps({"threads": THREADS, "config": CONFIG, "rows": rows}, indent=2))
    with capsys.disabled():
        heads = ("tokens", "HF ms", "ours ms", "speed-up", "best", "HF MB", "ours MB", "ratio")
        print("\n" + "".join(f"{head:>9}" for head in heads))
        for row in rows:
            whole = [f"{row[name]:>9.0f}" for name in ("tokens", "hf_ms", "ours_ms")]
            speed = [f"{row[name]:>9.2f}" for name in ("speed_up", "speed_up_best")]
            memory = [f"{row['hf_peak_mb']:>9.0f}", f"{row['ours_peak_mb']:>9.0f}", f"{row['memory_ratio']:>9.2f}"]
            print("".join(whole + speed + memory))
        print(f"written to {path}")


if __name__ == "__main__":
    print(peak_extra_bytes(sys.argv[1], int(sys.argv[2])))
