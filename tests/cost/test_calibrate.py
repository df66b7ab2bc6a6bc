"""Calibration on rows made from known coefficients: it finds them again, and its errors on rows left out are honest."""

import itertools

import numpy as np
import pytest

from emulator.cost.calibrate import calibrate, errors, measured_seconds, samples, with_coefficients
from emulator.cost.device import Coefficients, Device, load_device
from emulator.cost.kernel import Kernel
from emulator.cost.price import price
from emulator.cost.rows import Row, Setting

BARE = load_device("910C_752T").model_copy(update={"coefficients": {}})


def truth(key: str, **values: float) -> Device:
    return BARE.model_copy(update={"coefficients": {key: Coefficients(values=values, source="made for a test")}})


def rows_of(
    device: Device, kernels: list[Kernel], *, noise: float = 0.0, setting: Setting = "model", seed: int = 0
) -> list[Row]:
    scale = np.random.default_rng(seed).uniform(1 - noise, 1 + noise, len(kernels))
    return [
        Row(f"r{n}", device.name, k.family, setting, (k,), seconds=price(k, device).seconds * s, source="made up here")
        for n, (k, s) in enumerate(zip(kernels, scale))
    ]


NORMS = [
    Kernel("rms_norm", {"rows": rows, "width": width})
    for rows, width in itertools.product((1, 4, 12, 48, 200, 5000), (512, 4096))
]
GATHERS = [
    Kernel("collective", {"op": op, "ranks": tuple(range(count)), "bytes": size})
    for op in ("all_gather", "reduce_scatter")
    for count in (8, 16)
    for size in (1000, 300_000, 600_000, 3_000_000, 40_000_000)
]


def test_vector_coefficients_are_found_again() -> None:
    known = {"launch": 3.0, "fill": 12.0, "memory": 1.8, "row": 0.0, "vector": 0.0, "miss": 0.0}
    found = calibrate(rows_of(truth("rms_norm", **known), NORMS), BARE)[0]
    assert found.key == "rms_norm"
    values = found.coefficients["rms_norm"]
    assert values["launch"] == pytest.approx(3, rel=0.05)
    assert values["fill"] == pytest.approx(12, rel=0.05)
    # memory and vector work are proportional here (one dtype): only their sum is determined
    predicted = with_coefficients(BARE, [found])
    for kernel in NORMS:
        assert price(kernel, predicted).seconds == pytest.approx(
            price(kernel, truth("rms_norm", **known)).seconds, rel=0.04
        )


def test_collective_coefficients_and_their_switch_are_found_again() -> None:
    known = {"launch": 6.0, "wide": 14.0, "switch": 4.5, "wire": 0.94, "wire_reduce": 1.19}
    found = calibrate(rows_of(truth("collective", **known), GATHERS), BARE)[0]
    for term, value in known.items():
        assert found.coefficients["collective"][term] == pytest.approx(value, rel=0.05), term
    assert found.in_sample.mape < 1
    assert found.left_out is not None
    assert found.left_out.rows == len(GATHERS)
    assert found.left_out.mape < 3
    assert found.held_out is not None
    assert found.held_out.mape < 5


def test_left_out_errors_show_the_noise_that_a_fit_hides() -> None:
    known = {"launch": 6.0, "wide": 14.0, "switch": 4.5, "wire": 0.94, "wire_reduce": 1.19}
    found = calibrate(rows_of(truth("collective", **known), GATHERS, noise=0.3), BARE)[0]
    assert found.left_out is not None
    assert found.left_out.mape > found.in_sample.mape
    assert 8 < found.left_out.mape < 35  # uniform noise of 30 % is 15 % on average


def test_a_shape_is_left_out_with_all_its_rows() -> None:
    # each shape was measured twice, with times that no formula of its size gives: only if a row's twin is left out
    # with it does the error stay large
    kernels = [Kernel("sparse_attention", {"queries": (1,), "keys": (9000,), "heads": 64, "topk": topk, "qk": 576,
                                           "v": 512}) for topk in (500, 1000, 2000, 4000)]  # fmt: skip
    times = [100e-6, 700e-6, 30e-6, 900e-6]
    rows = [
        Row(f"r{n}", BARE.name, "sfa", "model", (kernel,), seconds=time)
        for n, (kernel, time) in enumerate(zip(kernels * 2, times * 2))
    ]
    found = calibrate(rows, BARE)[0]
    assert found.left_out is not None
    once = calibrate(rows[:4], BARE)[0]
    assert once.left_out is not None
    assert found.left_out.mape == pytest.approx(once.left_out.mape, rel=0.1)


def test_a_single_shape_has_no_error_on_rows_left_out() -> None:
    found = calibrate(rows_of(truth("rms_norm", launch=3.0), NORMS[:1] * 2), BARE)[0]
    assert found.left_out is None
    assert found.held_out is None
    assert found.in_sample.rows == 2


def test_what_rows_do_not_tell_keeps_its_start() -> None:
    base = truth("collective", launch=5.0, wide=33.0, switch=4.0, wire=1.0, wire_reduce=1.0)
    small = [k for k in GATHERS if len(k.sizes["ranks"]) == 8]
    found = calibrate(rows_of(base, small), base)[0]
    assert found.coefficients["collective"]["wide"] == 33.0  # no group of more than 8 ranks


@pytest.mark.parametrize(("setting", "micros"), [("model", 8.0), ("benchmark", 2.0)])
def test_a_launch_that_rows_do_not_show_is_that_of_their_setting(setting: Setting, micros: float) -> None:
    # products of a second: a launch of microseconds leaves no trace in them
    large = [Kernel("matmul", {"m": 1 << 18, "k": 1 << 14, "n": n}) for n in (1 << 14, 1 << 15, 3 << 14)]
    found = calibrate(rows_of(truth("matmul.16bit", cube=1.2), large, setting=setting), BARE, evaluate=False)
    assert found[0].coefficients["matmul.16bit"]["launch"] == pytest.approx(micros, rel=0.01)


def test_few_rows_stay_nearer_to_the_start_than_many() -> None:
    # a launch of 60 us where the fit starts from 20: two rows are believed less than thirty of the same sizes
    shapes = [{"queries": (n,), "keys": (9000,), "heads": 64, "topk": 2048, "qk": 576, "v": 512} for n in (1, 240)]
    both = [Kernel("sparse_attention", sizes) for sizes in shapes]
    known = truth("sparse_attention", launch=60.0, gather=1.7)

    def launch(kernels: list[Kernel]) -> float:
        found = calibrate(rows_of(known, kernels), BARE, evaluate=False)
        return found[0].coefficients["sparse_attention"]["launch"]

    few, many = launch(both), launch(both * 15)
    assert 20 < few < many < 60.1
    assert many == pytest.approx(60, rel=0.01)
    assert few < 59


def test_each_setting_gets_coefficients_of_its_own_where_rows_allow() -> None:
    inside = truth("collective", launch=20.0, wire=1.0, wire_reduce=1.2)
    alone = truth("collective", launch=5.0, wire=1.0, wire_reduce=1.2)
    rows = rows_of(inside, GATHERS) + rows_of(alone, GATHERS, setting="benchmark")
    profile = with_coefficients(BARE, calibrate(rows, BARE, evaluate=False))
    tiny = Kernel("collective", {"op": "all_gather", "ranks": (0, 1), "bytes": 8})
    assert price(tiny, profile).seconds == pytest.approx(20e-6, rel=0.1)
    assert price(tiny, profile, benchmark=True).seconds == pytest.approx(5e-6, rel=0.1)
    few = rows_of(inside, GATHERS) + rows_of(alone, GATHERS[:3], setting="benchmark")
    assert list(with_coefficients(BARE, calibrate(few, BARE, evaluate=False)).coefficients) == ["collective"]


def test_a_row_of_two_kernels_settles_the_unknown_one() -> None:
    both = BARE.model_copy(
        update={
            "coefficients": {
                "swiglu": Coefficients(values={"launch": 4.0, "memory": 1.5}, source="made for a test"),
                "copy": Coefficients(values={"launch": 2.0, "memory": 3.0}, source="made for a test"),
            }
        }
    )
    swiglu = [Kernel("swiglu", {"rows": r, "width": 4096}) for r in (100, 400, 1600, 6400)]
    pairs = [(Kernel("copy", {"rows": r, "width": 4096}), Kernel("swiglu", {"rows": r, "width": 4096})) for r in
             (300, 1200, 4800, 9000)]  # fmt: skip
    rows = rows_of(both, swiglu) + [
        Row(f"p{n}", BARE.name, "swi_glu", "model", pair, seconds=sum(price(k, both).seconds for k in pair))
        for n, pair in enumerate(pairs)
    ]
    results = {r.key: r for r in calibrate(rows, BARE, evaluate=False)}
    assert set(results) == {"swiglu", "copy+swiglu"}
    assert set(results["copy+swiglu"].coefficients) == {"copy"}
    profile = with_coefficients(BARE, list(results.values()))
    big = Kernel("copy", {"rows": 6000, "width": 4096})
    assert price(big, profile).seconds == pytest.approx(price(big, both).seconds, rel=0.06)


def test_provenance_is_kept() -> None:
    rows = rows_of(truth("collective", launch=6.0, wire=1.0, wire_reduce=1.0), GATHERS)
    profile = with_coefficients(BARE, calibrate(rows, BARE))
    found = profile.coefficients["collective"]
    assert (found.rows, found.source) == (20, "fitted to 20 rows of: made up here")
    assert found.error is not None
    assert found.error < 5


def test_rates_become_times_of_the_rows_own_work() -> None:
    kernel = Kernel("matmul", {"m": 100, "k": 200, "n": 300})
    flops = Row("a", BARE.name, "matmul", "model", (kernel,), rate=1e12, rate_of="flops")
    assert measured_seconds(flops, BARE) == pytest.approx(2 * 100 * 200 * 300 / 1e12)
    moved = Row("b", BARE.name, "matmul", "model", (kernel,), rate=1e9, rate_of="bytes")
    assert measured_seconds(moved, BARE) == pytest.approx(2 * (100 * 200 + 200 * 300 + 100 * 300) / 1e9)
    assert measured_seconds(Row("c", BARE.name, "matmul", "model", (kernel,)), BARE) is None


def test_rows_that_cannot_be_used_are_listed() -> None:
    kernel = Kernel("matmul", {"m": 1, "k": 2})
    given = [
        Row("a", BARE.name, "x", "model", why="no shapes"),
        Row("b", BARE.name, "matmul", "model", (kernel,), seconds=1.0),
        Row("c", BARE.name, "rms_norm", "model", (NORMS[0],)),
    ]
    used, left = samples(given, BARE)
    assert used == []
    assert [(row.id, why.split(": ")[-1]) for row, why in left] == [
        ("a", "no shapes"), ("b", "size 'n' is missing"), ("c", "no measured time"),
    ]  # fmt: skip


def test_errors_in_percent() -> None:
    found = errors([0.1, 0.2, float("nan"), 0.6])
    assert found is not None
    assert (found.rows, found.mape, found.median) == (3, pytest.approx(30), pytest.approx(20))
    assert found.p90 == pytest.approx(20 + 0.8 * 40)  # linear between the second and the third
    assert errors([float("nan")]) is None
