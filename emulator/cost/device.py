"""Device profiles: what one die can do, how dies are linked, and the coefficients fitted from measured rows.

A profile is a TOML file under profiles/devices or a user's own file. Rates are of one die; links count one direction.
"""

from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from emulator import profiles
from emulator.errors import UsageError, first_problem


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cores(_Table):
    """cube: AI cores for matrices (AIC); vector: vector cores (AIV); clock in Hz."""

    cube: PositiveInt
    vector: PositiveInt
    clock: PositiveFloat
    source: str


class Memory(_Table):
    """bytes of HBM; bandwidth in bytes/s, as specified; l2: bytes of the L2 cache."""

    bytes: PositiveInt
    bandwidth: PositiveFloat
    l2: PositiveInt
    source: str


class Peaks(_Table):
    """Operations per second by dtype, in torch's words."""

    rates: dict[str, PositiveFloat]
    source: str


class Link(_Table):
    """One level of the topology. dies: how many consecutive global ranks it joins; bandwidth: bytes/s one way per die;
    latency: seconds of one message."""

    name: str
    dies: PositiveInt
    bandwidth: PositiveFloat
    latency: float = Field(ge=0)
    source: str


class Coefficients(_Table):
    """Fitted factors of one form, by term: launch-like terms in microseconds, others a multiple of the ideal time.

    rows: how many measured rows they rest on (0: carried over or by hand); error: leave-one-out MAPE, percent.
    """

    values: dict[str, float]
    rows: int = Field(default=0, ge=0)
    error: float | None = None
    source: str

    @model_validator(mode="after")
    def _physical(self) -> "Coefficients":
        for name, value in self.values.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"coefficient {name} = {value} is not a number from 0 up")
        return self


class Device(_Table):
    """A die and its surroundings. aliases: other names of it in measured files. inherits: a profile whose coefficients
    fill in for those that this one lacks. links: from the innermost level outwards."""

    name: str
    title: str
    aliases: list[str] = []
    inherits: str | None = None
    cores: Cores
    cube: Peaks
    vector: Peaks
    memory: Memory
    links: list[Link] = Field(min_length=1)
    coefficients: dict[str, Coefficients] = {}

    @model_validator(mode="after")
    def _grows(self) -> "Device":
        sizes = [link.dies for link in self.links]
        if any(b % a or b == a for a, b in pairwise(sizes)):
            raise ValueError(f"links: dies must grow by whole factors from level to level, not {sizes}")
        return self

    def level(self, ranks: tuple[int, ...]) -> Link:
        """The innermost link level that joins these global ranks; ranks lie over the dies in order.

        The outermost level joins any number of dies.
        """
        for link in self.links[:-1]:
            if len({rank // link.dies for rank in ranks}) == 1:
                return link
        return self.links[-1]

    def names(self) -> set[str]:
        return {self.name, *self.aliases}


def _read(path: Path) -> Device:
    table = profiles.load_toml(path)
    try:
        return Device.model_validate({"name": path.stem, **table})
    except ValidationError as error:
        raise UsageError(f"{path}: {first_problem(error)}") from None


def _shipped() -> list[Device]:
    return [_read(path) for path in sorted((profiles.root() / "devices").glob("*.toml"))]


def _find(name_or_path: str) -> Device:
    by_name = profiles.root() / "devices" / f"{name_or_path}.toml"
    if by_name.is_file():
        return _read(by_name)
    if Path(name_or_path).is_file():
        return _read(Path(name_or_path))
    shipped = _shipped()
    for device in shipped:
        if name_or_path.casefold() in {name.casefold() for name in device.names()}:
            return device
    known = ", ".join(device.name for device in shipped)
    raise UsageError(f"unknown device {name_or_path!r}: no such file, and profiles/devices has {known}")


def _inherited(found: Coefficients, parent: str) -> Coefficients:
    """Measured on another device: no row of this one stands behind it."""
    return found.model_copy(update={"rows": 0, "error": None, "source": f"inherited from {parent}: {found.source}"})


def load_device(name_or_path: str) -> Device:
    """A device by profile name, by an alias of a shipped profile, or by path of a user's own TOML file.

    The coefficients of the profile it inherits from are filled in. UsageError for an unknown or malformed profile.
    """
    device = _find(name_or_path)
    seen = {device.name}
    coefficients = dict(device.coefficients)
    parent = device.inherits
    while parent is not None:
        if parent in seen:
            raise UsageError(f"device {device.name}: inherits from itself over {parent}")
        seen.add(parent)
        base = _find(parent)
        coefficients = {**{key: _inherited(c, parent) for key, c in base.coefficients.items()}, **coefficients}
        parent = base.inherits
    return device.model_copy(update={"coefficients": coefficients})
