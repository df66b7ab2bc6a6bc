"""Device profiles: shipped ones against published figures, topology, users' own files."""

from pathlib import Path

import pytest

from emulator import profiles
from emulator.cost.device import Device, load_device
from emulator.cost.forms import FORMS
from emulator.cost.kernel import Kernel
from emulator.cost.price import coefficients
from emulator.cost.profile_text import profile_text
from emulator.errors import UsageError

SHIPPED = sorted(path.stem for path in (profiles.root() / "devices").glob("*.toml"))


def test_the_devices_that_ship() -> None:
    assert SHIPPED == ["910B2", "910B3", "910B4", "910C_560T", "910C_752T", "950PR", "950PR_28"]


# cube bf16 and int8 in Tflop/s, cores, HBM bytes/s: CANN platform files, CloudMatrix384, Ascend 950 white paper
PUBLISHED = [
    ("910B2", 353.9, 707.8, 24, 48, 1.6), ("910B3", 294.9, 589.8, 20, 40, 1.6), ("910B4", 245.8, 491.5, 20, 40, 0.8),
    ("910C_752T", 353.9, 707.8, 24, 48, 1.6), ("950PR", 432, 865, 32, 64, 1.6), ("950PR_28", 378, 756, 28, 56, 1.4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bf16", "int8", "cube", "vector", "memory"), PUBLISHED)
def test_published_figures(name: str, bf16: float, int8: float, cube: int, vector: int, memory: float) -> None:
    device = load_device(name)
    assert device.cube.rates["bfloat16"] / 1e12 == pytest.approx(bf16)
    assert device.cube.rates["int8"] / 1e12 == pytest.approx(int8)
    assert (device.cores.cube, device.cores.vector) == (cube, vector)
    assert device.memory.bandwidth / 1e12 == pytest.approx(memory)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_has_a_source_and_every_family_a_price(name: str) -> None:
    device = load_device(name)
    tables = [device.cores, device.memory, device.cube, device.vector, *device.links, *device.coefficients.values()]
    assert all(len(table.source) > 10 for table in tables)
    for family in FORMS:
        for dtype in ("bfloat16", "int8"):
            if family != "vector" and not (family == "sparse_attention" and dtype == "int8"):
                assert coefficients(Kernel(family, {}, dtype), device)[1].values
    if "910" in name:  # the two vector and cube figures add up to the headline one
        total = device.cube.rates["bfloat16"] + device.vector.rates["bfloat16"]
        headline = {"910B2": 376, "910B3": 313, "910B4": 261, "910C_752T": 376, "910C_560T": 261}[name]
        assert total / 1e12 == pytest.approx(headline, rel=0.005)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("910C-die(A3)", "910C_752T"), ("A3", "910C_752T"), ("A3(presumed)", "910C_752T"), ("910B(A2)", "910B2"),
     ("950PR_957x/9579", "950PR"), ("ATLAS_800_A3_560T_128G_DIE", "910C_560T"),
     ("910c", "910C_752T"), ("ascend910b3", "910B3")],
)  # fmt: skip
def test_names_in_measured_files_are_aliases(alias: str, name: str) -> None:
    assert load_device(alias).name == name


def test_no_alias_names_two_devices() -> None:
    names = [alias for name in SHIPPED for alias in load_device(name).names()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("ranks", "level"),
    [((0, 1), "SIO"), ((1, 2), "UB node"), (tuple(range(16)), "UB node"), ((15, 16), "UB supernode"),
     (tuple(range(0, 768, 16)), "UB supernode"), ((0, 768), "RoCE"), ((3,), "SIO"), ((0, 10**6), "RoCE")],
)  # fmt: skip
def test_levels_of_groups_on_a_supernode(ranks: tuple[int, ...], level: str) -> None:
    assert load_device("910C_752T").level(ranks).name == level


def test_a_profile_text_reads_back(tmp_path: Path) -> None:
    device = load_device("950PR")
    path = tmp_path / "950PR.toml"
    path.write_text(profile_text(device))
    assert load_device(str(path)) == device


def own(tmp_path: Path, device: Device) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(profile_text(device))
    return path


def test_a_users_profile_inherits_coefficients(tmp_path: Path) -> None:
    base = load_device("910C_752T")
    mine = base.model_copy(
        update={"inherits": "910C_752T", "coefficients": {"indexer": base.coefficients["matmul.int8"]}, "aliases": []}
    )
    found = load_device(str(own(tmp_path, mine)))
    assert found.name == "mine"
    assert found.coefficients["indexer"] == base.coefficients["matmul.int8"]
    carried = found.coefficients["collective"]
    assert carried.values == base.coefficients["collective"].values
    assert (carried.rows, carried.error) == (0, None)  # no row of this device stands behind it
    assert carried.source.startswith("inherited from 910C_752T: fitted to ")


def test_users_mistakes_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown device 'nope'.*910B2, 910B3.*950PR"):
        load_device("nope")
    text = profile_text(load_device("910B4"))
    cases = [
        ("cube = 20", "cube = 0", "cores.cube = 0: input should be greater than 0"),
        ("[memory]", "[memori]", "memory: field required"),
        ("dies = 8", "dies = 3000", "dies must grow by whole factors"),
        ('inherits = "910B2"', 'inherits = "mine"', "device mine: inherits from itself"),
        ("clock = ", "clock = = ", "not readable as TOML"),
    ]
    for old, new, why in cases:
        path = tmp_path / "mine.toml"
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(UsageError, match=why) as raised:
            load_device(str(path))
        assert "\n" not in str(raised.value)


def test_a_coefficient_must_be_physical(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = profile_text(load_device("910B4"))
    path.write_text(text + '[coefficients.mine]\nvalues = { launch = -1.0 }\nsource = "a test of signs"\n')
    with pytest.raises(UsageError, match=r"coefficients.mine: coefficient launch = -1.0 is not a number from 0 up"):
        load_device(str(path))
