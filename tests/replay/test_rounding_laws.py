"""The laws of rounding on exact numbers: what breaks each of them, and what does not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tensorprobe.errors import BadUsage
from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay import calibration
from tensorprobe.replay.calibration import CalibratedKernel, read_table
from tensorprobe.replay.departures import cast_breach, depart, exact_breach, settle
from tensorprobe.replay.rounding_laws import Departure, Law, breach

ONCE = Law("once", beyond=0.01, factor=0.1, offset=0.1, length=256)
OFTEN = Law("often", factor=0.5, offset=0.5)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def exact(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_the_nearest_number_departs_by_nothing(dtype: torch.dtype) -> None:
    y = exact(64, 80)
    found = depart(y.to(dtype), y)
    assert found.beyond < 1e-3  # torch rounds float64 twice
    assert (found.factor, found.offset) == (0.0, 0.0)


def test_one_number_off_by_a_neighbour_is_beyond() -> None:
    y = exact(64, 80)
    x = y.to(BF16)
    x[3, 4] = torch.nextafter(x[3, 4], torch.tensor(100.0, dtype=BF16))
    found = breach(depart(x, y), ONCE)
    assert found is not None
    assert (found.law, found.n) == ("once", 1)
    assert 0 < found.amount <= 1.0


def test_longer_sums_may_be_further_beyond() -> None:
    departure = Departure(beyond=0.05, n=100)
    assert breach(departure, ONCE, length=256) is not None
    assert breach(departure, ONCE, length=2048) is None


@pytest.mark.parametrize(("at", "where"), [
    ((slice(None),), "tensor"), ((7,), "row"), ((slice(None), 9), "column"),
])  # fmt: skip
def test_a_factor_is_seen_where_it_is(at: tuple[object, ...], where: str) -> None:
    y = exact(2000, 2000) if where != "tensor" else exact(64, 80)
    wrong = y.clone()
    wrong[at] *= 1 + 8 * 2.0**-24
    found = breach(depart(wrong.to(F32), y), OFTEN)
    assert found is not None
    assert (found.law, found.where) == ("factor", where)
    assert 4 < found.amount <= 8.5


def test_a_head_that_is_scaled_is_seen() -> None:
    y = exact(4, 8, 32, 16)
    wrong = y.clone()
    wrong[:, 3] *= 1.01
    noise = exact(4, 8, 32, 16).flip(0) * y.abs() * 2.0**-8
    assert breach(depart((y + noise).to(BF16), y), OFTEN) is None
    found = breach(depart((wrong + noise).to(BF16), y), OFTEN)
    assert found is not None
    assert found.law == "factor"


def test_numbers_that_repeat_count_once() -> None:
    y = exact(8, 1).expand(8, 4000).clone()
    x = y.to(F32)
    x = torch.nextafter(x, torch.full_like(x, 10))  # up in all of only 8 different numbers
    quick = depart(x, y)
    assert quick.offset > 0.5
    assert settle(x, y, OFTEN, 1.0, lambda step: [])[1] is None


def test_an_ill_conditioned_call_may_depart_by_more() -> None:
    y = exact(64, 80)
    x = (y * (1 + 8 * 2.0**-24)).to(F32)
    assert settle(x, y, OFTEN, 1.0, lambda step: [y * step])[1] is not None
    assert settle(x, y, OFTEN, 1.0, lambda step: [y * step * 100])[1] is None


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), 1e-40, -3e38])
def test_special_numbers_are_left_out(value: float) -> None:
    y = exact(64, 80)
    x = y.to(BF16)
    x[0, 0], y[0, 0] = value, value * 1.5
    assert breach(depart(x, y), ONCE) is None


def test_empty_and_lone_results() -> None:
    assert depart(torch.empty(0, dtype=BF16), torch.empty(0).double()) == Departure()
    assert depart(torch.tensor(1.0, dtype=BF16), torch.tensor(1.0).double()).beyond == 0


NARROW = [BF16, F16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("source", [F32, torch.float64], ids=str)
def test_torchs_own_casts_are_right(dtype: torch.dtype, source: torch.dtype) -> None:
    x = torch.cat([exact(5000), exact(5000) * 1e-3, torch.tensor([0.0, 1.0, -2.5, 1e9])]).to(source)
    assert cast_breach(x.to(dtype), x) is None


def test_a_cast_with_one_wrong_number_is_no_truncation() -> None:
    x = exact(500).float()
    found = x.to(BF16)
    found[7] = -found[7]
    broken = cast_breach(found, x)
    assert broken is not None
    assert (broken.law, broken.n, broken.of) == ("cast", 1, 500)


def test_moved_numbers_are_the_same_or_wrong() -> None:
    x = torch.tensor([1.0, float("nan"), -0.0, float("inf")])
    assert exact_breach(x, torch.tensor([1.0, float("nan"), 0.0, float("inf")])) is None
    broken = exact_breach(x, torch.tensor([1.0, 2.0, 0.0, float("inf")]))
    assert broken is not None
    assert broken.n == 1


# The table


def test_the_table_says_what_made_it() -> None:
    sections = read_table(calibration.TABLE)
    assert {"cpu", "cuda"} <= {section.device for section in sections}
    assert all(section.made_by["torch"] for section in sections)


def test_a_law_needs_enough_calls_and_small_departures() -> None:
    few, enough = CalibratedKernel(calls=3), CalibratedKernel(calls=300, beyond=0.004)
    assert few.law("bfloat16") is None
    assert enough.law("bfloat16") == Law("once", 0.01, 0.1, 0.1, 256)
    often = CalibratedKernel(calls=300, beyond=0.6, factor=0.2).law("bfloat16")
    assert often is not None
    assert (often.kind, often.factor) == ("often", pytest.approx(0.6))
    assert CalibratedKernel(calls=300, factor=50.0).law("bfloat16") is None
    assert enough.law("float64") is None
    shared = CalibratedKernel(calls=300).law("float32", shares=True)
    assert shared is not None
    assert shared.factor == 2.0


def test_a_table_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    path.write_text("{}")
    with pytest.raises(BadUsage, match="is no table of calibrated kernels"):
        read_table(path)


def test_a_table_of_ones_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = TensorRecord("A.mystery.0.forward.output.0", "output", "bfloat16", (4,), device="npu:0")
    call = Call(index=0, name="A.mystery.0.forward", op="a.mystery", tensors=(out,))
    assert calibration.law_of(call, None, out) is None
    kernels = {calibration.key_of(call, None, out): {"calls": 100, "beyond": 0.02}}
    table = [{"device": "npu", "made_by": {"torch": "2.6"}, "kernels": kernels}]
    path = tmp_path / "own.json"
    path.write_bytes(msgspec.json.encode(table))
    monkeypatch.setenv(calibration.OWN_TABLE, str(path))
    law = calibration.law_of(call, None, out)
    assert law is not None
    assert (law.kind, law.beyond) == ("once", 0.04)


def test_a_kernel_is_known_by_what_makes_its_rounding() -> None:
    def record(name: str, role: str, *shape: int, dtype: str = "bfloat16") -> TensorRecord:
        return TensorRecord(f"{name}.{role}", role.partition(".")[0], dtype, shape)  # type: ignore[arg-type]

    name, back = "Tensor.mul.0.forward", "Tensor.mul.0.backward"
    given = record(name, "input.0", 4, 8), record(name, "input.1", 8)
    forward = Call(index=0, name=name, op="torch.Tensor.mul_", tensors=given)
    sent = [record(back, "output.0", 4, 8), record(back, "output.1", 8)]
    tensors = (record(back, "input.0", 4, 8), *sent)
    backward = Call(index=1, name=back, op="torch.Tensor.mul_", tensors=tensors)
    keys = [calibration.key_of(forward, backward, each) for each in sent]
    assert keys == ["mul backward bfloat16", "mul backward summed bfloat16 output.1"]
    scaled = Call(index=2, name=name, op="torch.Tensor.mul", args=(given[0], 0.3), tensors=given)
    made = record(name, "output.0", 4, 8, dtype="float32")
    assert calibration.key_of(scaled, None, made) == "mul bfloat16 to float32 number"
    name = "Module.fc.Linear.forward.0"
    module = Call(index=3, name=name, op="torch.nn.modules.linear.Linear", tensors=given)
    assert calibration.key_of(module, None, record(name, "output.0", 4, 8)) == "linear bfloat16"
