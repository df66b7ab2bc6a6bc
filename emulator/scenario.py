"""Scenarios: what to run. Validates all user input; errors are one clear line."""

import math
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from emulator import profiles
from emulator.cost.device import load_device
from emulator.errors import UsageError, first_problem
from emulator.model.batch import Request
from emulator.model.config import HF_LATENT_NORM_EPS, ModelConfig, load_config, model_folder
from emulator.model.layers import ProgramOptions
from emulator.runtime.mesh import Mesh

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Parallel(BaseModel):
    """Sizes only; behaviour follows from plan and model. ep: None = the largest that divides ranks and experts."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tp: PositiveInt = 4
    dp: PositiveInt = 1
    ep: PositiveInt | None = None


StepRequests = list[list[Request]]  # by dp rank


class RequestSpec(BaseModel):
    """q: new tokens of this step (0: the request sits out). context: tokens already in the caches."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    q: NonNegativeInt
    context: NonNegativeInt = 0


class StepSpec(BaseModel):
    """requests: of the one dp rank, or a list for each dp rank. The i-th request of every step is the same sequence."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    requests: list[RequestSpec] | list[list[RequestSpec]]

    def by_dp_rank(self) -> StepRequests:
        ranks = [r for r in self.requests if isinstance(r, list)]
        if len(ranks) != len(self.requests) or not ranks:
            ranks = [[r for r in self.requests if isinstance(r, RequestSpec)]]
        return [[Request(r.q, r.context) for r in requests] for requests in ranks]


class Scenario(BaseModel):
    """model x plan x parallel sizes x workload.

    tokens: of one prefill request per dp rank, where no step is given. step: batches that run one after the other on
    the same caches. model: a name under profiles/models or an HF model directory. model_sizes: sizes of its config.json
    to change. weights: "seed", or a checkpoint directory. quant: scheme that they are quantised by (profiles/quant).
    attention: what attention multiplies, apart from quant: the dtype, or (dense MLA only) int8 codes.
    mode: real tensors, or shapes only. passes: FX passes over the rank graph, in order. contract: in place of the
    plan's; with passes, the only one that is checked. fault: one of faults/catalogue, injected on purpose.
    mtp: with the model's multi-token-prediction layer behind it.
    latent_norm_eps: hf (1e-6 always) or config (as engines do). device: profile (profiles/devices) that the run's
    traces are priced on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = "custom"
    description: str = ""
    model: str
    plan: str = "dsa_cp"
    parallel: Parallel = Parallel()
    tokens: PositiveInt = 256
    step: list[StepSpec] = []
    layers: PositiveInt | None = None
    model_sizes: dict[str, int] = {}
    mode: Literal["real", "shape"] = "real"
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    variants: dict[str, str] = {}
    contract: str | None = None
    passes: list[str] = []
    fault: str | None = None
    static_check: bool = True
    seed: int = 0
    weights: str = "seed"
    quant: str = "none"
    attention: Literal["float", "int8"] = "float"
    mtp: bool = False
    latent_norm_eps: Literal["hf", "config"] = "hf"
    device: str | None = None
    timeout: float = Field(default=60.0, gt=0)

    def config(self) -> ModelConfig:
        config = load_config(self.model).with_layers(self.layers)
        return config.with_sizes(self.model_sizes) if self.model_sizes else config

    def mesh(self, config: ModelConfig) -> Mesh:
        parallel = self.parallel
        world = parallel.dp * parallel.tp
        ep = math.gcd(world, config.n_routed_experts) if parallel.ep is None else parallel.ep
        return Mesh(tp=parallel.tp, dp=parallel.dp, ep=ep)

    def steps(self) -> list[StepRequests]:
        """Every step's requests, by dp rank. UsageError when a step does not say them for each dp rank."""
        dp = self.parallel.dp
        if not self.step:
            return [[[Request(self.tokens)] for _ in range(dp)]]
        found = [step.by_dp_rank() for step in self.step]
        for number, ranks in enumerate(found):
            if len(ranks) != dp:
                raise UsageError(f"step {number}: requests of {len(ranks)} dp ranks, but dp is {dp}")
        return found

    @property
    def num_tokens(self) -> int:
        """Query tokens of all steps and dp ranks."""
        return sum(r.query for step in self.steps() for requests in step for r in requests)

    def options(self) -> ProgramOptions:
        eps = HF_LATENT_NORM_EPS if self.latent_norm_eps == "hf" else None
        return ProgramOptions(latent_norm_eps=eps, quant=self.quant, attention=self.attention, mtp=self.mtp)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def parse_requests(text: str) -> StepSpec:
    """The command line's form of a step: q:context,q:context,... and `/` between dp ranks; context 0 may be left out.

    Raises UsageError for what is no such list.
    """
    ranks = []
    for part in text.split("/"):
        requests = []
        for item in filter(None, part.split(",")):
            q, _, context = item.partition(":")
            if not q.isdigit() or not (context or "0").isdigit():
                raise UsageError(f"--requests {text}: {item!r} is not q or q:context (such as 5:0,3:10)")
            requests.append(RequestSpec(q=int(q), context=int(context or 0)))
        ranks.append(requests)
    return StepSpec(requests=ranks)


def load_scenario(name: str, overrides: dict[str, Any] | None = None) -> Scenario:
    """A scenario by name, by path of a TOML file, or from a model directory; `overrides` are the command line's.

    Raises UsageError for an unknown name or a field that is unknown or out of range.
    """
    path = profiles.find("scenarios", name)
    if path.is_dir() or path.name == "config.json":
        folder = model_folder(str(path))
        has_weights = any(folder.glob("model*.safetensors*"))
        data: dict[str, Any] = {
            "name": folder.name,
            "model": str(folder),
            "weights": str(folder) if has_weights else "seed",
        }
    else:
        data = {"name": path.stem, **profiles.load_toml(path)}
    merged = _merge(data, overrides or {})
    try:
        scenario = Scenario.model_validate(merged)
    except ValidationError as error:
        raise UsageError(f"scenario {name}: {first_problem(error)}") from None
    if scenario.device is not None:
        load_device(scenario.device)  # an unknown one is told before anything runs
    return scenario


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins; tables are merged, None means not given."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict):
            old = base.get(key) or {}
            merged[key] = _merge(old, value) if isinstance(old, dict) else old  # pydantic says what is wrong with it
        elif value is not None:
            merged[key] = value
    return merged


def default_out_dir(scenario: Scenario) -> Path:
    """runs/<scenario>-<plan>-tp<n> below the current folder."""
    return Path("runs") / f"{scenario.name}-{Path(scenario.plan).stem}-tp{scenario.parallel.tp}"
