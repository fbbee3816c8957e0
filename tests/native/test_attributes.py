"""What C++ reads of Python's objects is in one table, which is compared with the classes."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from msgspec import NODEFAULT
from msgspec.structs import FieldInfo, fields

import tensorprobe as tp
from tensorprobe import native
from tensorprobe.native import attributes
from tensorprobe.record import tape
from tensorprobe.store.lines import CallLine

pytestmark = pytest.mark.skipif(
    native.MODULE is None, reason="not built: python -m tensorprobe.native.build"
)


def test_every_class_of_the_table_has_its_attributes() -> None:
    table = native.MODULE.ATTRIBUTES
    absent = set()
    for name in table:
        home = name.rpartition(".")[0]
        if home.startswith("tensorprobe."):
            try:
                importlib.import_module(home)
            except ImportError:  # Triton is missing, or is the one of torch 2.1
                absent.add(name)
    done: set[str] = set()
    attributes.check(native.MODULE, done)
    assert absent <= {"tensorprobe.tensors.launch.Flagger"}
    assert done == {*table} - absent


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "del tape.Tape.gap",
            "native/attributes.h: C++ reads gap of tensorprobe.record.tape.Tape, "
            "which has no such attribute.",
        ),
        (
            "del tape.Tape",
            "native/attributes.h names tensorprobe.record.tape.Tape, "
            "and tensorprobe.record.tape has no Tape",
        ),
    ],
)
def test_a_missing_attribute_is_one_clear_error(change: str, said: str) -> None:
    code = f"from tensorprobe import native\nfrom tensorprobe.record import tape\n{change}\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}native.MODULE"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"AttributeError: {said}" in done.stderr


def test_an_attribute_that_only_init_sets_is_known() -> None:
    names = attributes.names_of(tape.Tape)
    assert {"recording", "ids", "gap"} <= names
    assert "nothing_of_this_name" not in names


def test_no_header_reads_an_attribute_past_the_table() -> None:
    strings = re.compile(r"InternFromString|(Get|Set|Has)AttrString|CallMethod\(")
    folder = Path(native.__file__).parent
    found = {
        path.name
        for path in (*folder.glob("*.h"), *folder.glob("*.cpp"))
        if strings.search(path.read_text())
    }
    # asking.h makes them, of names in the table; the other asks for a type of Python's own
    assert found == {"asking.h", "torch_versions.h"}


def test_fields_are_written_in_the_order_of_the_struct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The struct in store/lines.py is the only place that knows the order."""
    plain = record(tmp_path / "plain")
    turned = msgspec.defstruct(
        "Turned",
        [(field.name, field.type, default_of(field)) for field in reversed(fields(CallLine))],
        tag_field="type",
        tag="call",
        omit_defaults=True,
        kw_only=True,
    )
    monkeypatch.setattr(tape, "CallLine", turned)
    assert record(tmp_path / "turned") == [[line[0], *reversed(line[1:])] for line in plain]
    assert len(plain) > 3


def default_of(field: FieldInfo) -> object:
    if field.default_factory is not NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.field(default=field.default)


def record(folder: Path) -> list[list[str]]:
    """The names of the fields of every forward call, as they stand in the log."""
    weight = torch.ones(3, 3, requires_grad=True)
    with tp.Recorder(folder, level="L1", keep="stats"):
        F.softmax(F.linear(torch.ones(2, 3), weight), dim=1).sum().backward()
    (log,) = folder.rglob("calls.jsonl")
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    return [[*line] for line in lines if line["type"] == "call" and "direction" not in line]
