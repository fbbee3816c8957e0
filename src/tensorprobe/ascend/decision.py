"""The guide's decision tree: does it fail alone, and if so, with what input?"""

from __future__ import annotations

from typing import Literal

import msgspec

from tensorprobe.ascend.abnormal_values import Statistics
from tensorprobe.ascend.addresses import AddressCheck
from tensorprobe.ascend.dump import DumpTensor
from tensorprobe.ascend.errorcodes import ErrorBit
from tensorprobe.ascend.kernel import FaultPlace

Branch = Literal[
    "does not reproduce",
    "reproduces with abnormal input",
    "reproduces with clean input",
    "could not tell",
]


class TensorReport(msgspec.Struct, frozen=True):
    """One dumped tensor of the op, looked at."""

    role: Literal["input", "output"]
    index: int
    tensor: DumpTensor
    statistics: Statistics

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"


def conclude(
    reproduced: bool | None,
    values: tuple[TensorReport, ...],
    addresses: tuple[AddressCheck, ...],
    bits: tuple[ErrorBit, ...],
    place: FaultPlace | None,
    producers: list[str],
    has_case: bool,
) -> tuple[Branch, str, tuple[str, ...]]:
    """Branch, conclusion in a sentence, and what to do next."""
    looked = [report for report in values if report.role == "input"]
    abnormal = [report for report in looked if report.statistics.alarms]
    wrong = [check for check in addresses if check.is_bad]
    found = "; ".join(f"{report.name} has {report.statistics.alarms[0]}" for report in abnormal[:3])
    data_bit = next((bit for bit in bits if bit.points_at_data), None)
    if reproduced is False:
        return "does not reproduce", _not_alone(wrong, addresses), _address_steps(wrong, addresses)
    if reproduced and abnormal:
        text = f"reproduces with abnormal input: {found}"
        if data_bit is not None:
            text += f", and the code says so ({data_bit.name}: {data_bit.meaning})"
        return "reproduces with abnormal input", text, _data_steps(producers)
    if reproduced and looked:
        return (
            "reproduces with clean input",
            "reproduces with clean input: the fault is in the operator's own code"
            + (f", at {_place_text(place)}" if place is not None else ""),
            _code_steps(place),
        )
    if reproduced:
        return (
            "could not tell",
            "could not tell: it reproduces alone, but no input data is there to look at",
            ("give the dump with --dump, or make the next run leave one (see missing)",),
        )
    text, steps = _not_run(looked, abnormal, found, wrong, data_bit, bits)
    if not has_case:
        text = "could not tell: too little is known for a case (see missing)"
        steps = ("make the next run leave what is missing, and come back with it",)
    return "could not tell", text, steps


def _not_run(
    looked: list[TensorReport],
    abnormal: list[TensorReport],
    found: str,
    wrong: list[AddressCheck],
    data_bit: ErrorBit | None,
    bits: tuple[ErrorBit, ...],
) -> tuple[str, tuple[str, ...]]:
    """Before the case was run: what the leftovers alone make likely."""
    if abnormal:
        hint = f"abnormal input: {found}"
        hint += f", as the code says ({data_bit.name})" if data_bit is not None else ""
    elif any(bit.is_hardware for bit in bits):
        hint = f"the code speaks of hardware: {next(b for b in bits if b.is_hardware).name}"
    elif wrong:
        hint = f"the address check objects: {wrong[0]}"
    elif looked:
        hint = "clean input: no abnormal value in what was dumped"
    else:
        hint = "no input data to look at"
    return (
        f"could not tell: the case has not been run yet. So far: {hint}",
        (
            "run the case on a machine with the card: python3.7 main.py",
            "then come back with --reproduced yes (it failed with a code 0x7....) or --reproduced "
            "no (it passed), or with its output: --case-log FILE",
        ),
    )


def _not_alone(wrong: list[AddressCheck], addresses: tuple[AddressCheck, ...]) -> str:
    text = "does not reproduce: the operator alone is sound. "
    if wrong:
        return text + f"The address check objects: {'; '.join(map(str, wrong[:3]))}"
    if any(check.standing == "inside" for check in addresses):
        return text + "The address check finds every argument in allocated memory"
    return text + "The address check has nothing to compare with"


def _address_steps(
    wrong: list[AddressCheck], addresses: tuple[AddressCheck, ...]
) -> tuple[str, ...]:
    if wrong:
        return (
            "find who frees or sizes that memory: search the log for its address",
            "look at the ops before this one on its stream, and at memory reuse between streams",
        )
    if any(check.standing == "inside" for check in addresses):
        return (
            "addresses are sound: look for ops before this one that write out of bounds",
            "run the address checker (addr_checker) on the whole network",
        )
    return (
        "rerun with ASCEND_GLOBAL_LOG_LEVEL=1 so that the log has DevMalloc and DevFree lines",
        "run the address checker (addr_checker) on the whole network",
    )


def _data_steps(producers: list[str]) -> tuple[str, ...]:
    who = f"the ops that feed it: {', '.join(producers[:5])}" if producers else "what feeds it"
    return (f"find which op made the abnormal values: dump and inspect {who}",)


def _code_steps(place: FaultPlace | None) -> tuple[str, ...]:
    if place is not None and place.cce_line is not None:
        return (f"read the operator's code at {_place_text(place)}",)
    return (
        "get the line: op_debug_level=2, then an object dump of the kernel's .o (see missing)",
        "give the case folder to whoever owns the operator",
    )


def _place_text(place: FaultPlace) -> str:
    text = f"offset {place.offset if place.refined_offset is None else place.refined_offset:#x}"
    if place.cce_line is not None:
        text += f", CCE line {place.cce_line}"
    if place.python_file is not None:
        text += f", {place.python_file}:{place.python_line}"
    return text
