"""Converting dumps: names, types, layouts, directories, and never a byte outside OUT."""

from __future__ import annotations

import csv
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from ascend_files import (
    BF16,
    DUMP_NAME,
    FRACTAL_NZ,
    INT32,
    Tensor,
    dump_bytes,
    write_dump,
)
from safetensors.numpy import load_file

from tensorprobe.ascend.dump_conversion import FAILED_LIST, ConversionPlan, convert
from tensorprobe.cli.main import main
from tensorprobe.errors import BadUsage

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_names_and_content_of_the_default(tmp_path: Path) -> None:
    write_dump(
        tmp_path / DUMP_NAME,
        inputs=[Tensor(X), Tensor(np.array([5], np.int32), INT32)],
        outputs=[Tensor(np.full((), 2.5, np.float32))],
        buffers=[b"l1"],
        spaces=[b"work"],
    )
    out = tmp_path / "out"
    done = convert([tmp_path / DUMP_NAME], out)
    assert done.failed == ()
    assert names(out) == [
        f"{DUMP_NAME}.input.0.npy",
        f"{DUMP_NAME}.input.1.npy",
        f"{DUMP_NAME}.l1buffer.0.bin",
        f"{DUMP_NAME}.output.0.npy",
        f"{DUMP_NAME}.space.0.bin",
    ]
    np.testing.assert_array_equal(np.load(out / f"{DUMP_NAME}.input.0.npy"), X)
    scalar = np.load(out / f"{DUMP_NAME}.output.0.npy")
    assert scalar.shape == (1,)
    assert (out / f"{DUMP_NAME}.space.0.bin").read_bytes() == b"work"
    mode = stat.S_IMODE((out / f"{DUMP_NAME}.input.0.npy").stat().st_mode)
    assert mode == 0o600


def test_bin_has_shape_dtype_and_format_in_its_name(tmp_path: Path) -> None:
    raw = X.astype(ml_dtypes.bfloat16)
    write_dump(tmp_path / "A.b.1.2", inputs=[Tensor(raw.tobytes() + bytes(8), BF16, shape=(3, 4))])
    convert([tmp_path / "A.b.1.2"], tmp_path / "out", ConversionPlan("bin"))
    path = tmp_path / "out" / "A.b.1.2.input.0.3_4.bfloat16.ND.bin"
    assert path.read_bytes() == raw.tobytes()


EXOTIC = {
    27: ("bfloat16", np.float32),
    34: ("float8_e5m2", np.float32),
    35: ("float8_e4m3fn", np.float32),
    33: ("hifloat8", np.float32),
    28: ("int4", np.int8),
    29: ("uint1", np.uint8),
    32: ("complex32", np.complex64),
    37: ("float6_e3m2", np.float32),
    11: ("bool", np.bool_),
    8: ("int64", np.int64),
}


CODES = {
    "BF16": ml_dtypes.bfloat16, "F8_E5M2": ml_dtypes.float8_e5m2, "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "I8": np.int8, "U8": np.uint8, "C64": np.complex64,
    "BOOL": np.bool_, "I64": np.int64,
}  # fmt: skip


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """By the letter of the format: the library's numpy side knows no fp8."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    del entries["__metadata__"]
    out = {}
    for name, entry in entries.items():
        begin, end = (8 + size + at for at in entry["data_offsets"])
        flat = np.frombuffer(data[begin:end], np.uint8).view(CODES[entry["dtype"]])
        out[name] = flat.reshape(entry["shape"])
    return out


def test_the_library_opens_our_safetensors(tmp_path: Path) -> None:
    raw = X.astype(ml_dtypes.bfloat16)
    tensors = [Tensor(X), Tensor(raw.tobytes(), BF16, shape=(3, 4)), Tensor(b"", shape=(0, 2))]
    write_dump(tmp_path / "A.b.1.2", inputs=tensors, outputs=[Tensor(np.full((), 2, np.float32))])
    convert([tmp_path / "A.b.1.2"], tmp_path / "out", ConversionPlan("safetensors"))
    stored = load_file(tmp_path / "out" / "A.b.1.2.safetensors")
    np.testing.assert_array_equal(stored["input.0"], X)
    np.testing.assert_array_equal(stored["input.1"], raw)
    assert stored["input.2"].shape == (0, 2)
    assert stored["output.0"].shape == ()


def test_every_type_in_npy_and_safetensors_is_what_the_dump_decodes_to(tmp_path: Path) -> None:
    from tensorprobe.ascend.dump import read_dump
    from tensorprobe.ascend.element_types import kind_of, widened

    rng = np.random.default_rng(3)
    tensors = []
    for number, (name, _) in EXOTIC.items():
        nbytes = -(-24 * kind_of(name).bits // 8)
        top = 2 if name == "bool" else 256
        raw = rng.integers(0, top, nbytes, dtype=np.uint8).tobytes()
        tensors.append(Tensor(raw, number, shape=(2, 12)))
    path = write_dump(tmp_path / "A.b.1.2", inputs=tensors)
    convert([path], tmp_path / "npy")
    convert([path], tmp_path / "st", ConversionPlan("safetensors"))
    stored = read_safetensors(tmp_path / "st" / "A.b.1.2.safetensors")
    assert len(stored) == len(tensors)
    for tensor, (name, wide) in zip(read_dump(path).tensors, EXOTIC.values(), strict=True):
        array = np.load(tmp_path / "npy" / f"A.b.1.2.{tensor.name}.npy")
        assert array.dtype == wide, name
        np.testing.assert_array_equal(array, widened(tensor.array()), err_msg=name)
        exact = stored[tensor.name]
        assert exact.shape == (2, 12)
        np.testing.assert_array_equal(exact.astype(wide), array, err_msg=name)
    assert stored["input.0"].dtype == ml_dtypes.bfloat16


def test_chunks_join_without_a_seam(tmp_path: Path) -> None:
    """More than one chunk of a type that is decoded piece by piece, and of odd width."""
    from tensorprobe.ascend import dump_conversion as module

    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, 3 * module._CHUNK + 3 * 64, dtype=np.uint8)
    count = raw.size * 8 // 6
    path = write_dump(tmp_path / "A.b.1.2", inputs=[Tensor(raw.tobytes(), 37, shape=(count,))])
    convert([path], tmp_path / "out")
    array = np.load(tmp_path / "out" / "A.b.1.2.input.0.npy", mmap_mode="r")
    from tensorprobe.ascend.element_types import decode

    np.testing.assert_array_equal(array[-9000:], decode(raw, "float6_e3m2", count)[-9000:])


@pytest.mark.parametrize("to", ["npy", "bin", "safetensors"])
def test_blocks_that_are_cut_give_the_elements_that_are_there(tmp_path: Path, to: str) -> None:
    raw = np.arange(3).astype(ml_dtypes.bfloat16).tobytes() + b"\1"
    write_dump(
        tmp_path / "A.b.1.2",
        inputs=[
            Tensor(raw, BF16, shape=(10,)),
            Tensor(raw, 1, shape=(10,)),
            Tensor(b"", 1, shape=(4,)),
        ],
    )
    done = convert([tmp_path / "A.b.1.2"], tmp_path / "out", ConversionPlan(to))
    assert done.failed == ()
    assert len(done.results[0].warnings) == 3
    if to == "npy":
        first = np.load(tmp_path / "out" / "A.b.1.2.input.0.npy")
        np.testing.assert_array_equal(first, [0, 1, 2])
        assert np.load(tmp_path / "out" / "A.b.1.2.input.1.npy").shape == (1,)
        assert np.load(tmp_path / "out" / "A.b.1.2.input.2.npy").shape == (0,)
    elif to == "safetensors":
        stored = read_safetensors(tmp_path / "out" / "A.b.1.2.safetensors")
        assert [array.shape for array in stored.values()] == [(3,), (1,), (0,)]


def nz(x: np.ndarray) -> np.ndarray:
    rows, columns = (-(-size // 16) * 16 for size in x.shape)
    full = np.zeros((rows, columns), x.dtype)
    full[: x.shape[0], : x.shape[1]] = x
    return full.reshape(rows // 16, 16, columns // 16, 16).transpose(2, 0, 1, 3).copy()


def test_format_puts_blocks_in_order(tmp_path: Path) -> None:
    x = np.arange(62 * 20, dtype=np.float32).reshape(62, 20)
    known = Tensor(nz(x), fmt=FRACTAL_NZ, original=(62, 20))
    write_dump(tmp_path / "A.b.1.2", outputs=[known, Tensor(X)])
    convert([tmp_path / "A.b.1.2"], tmp_path / "out", ConversionPlan(format="ND"))
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "A.b.1.2.output.0.62x20.npy"), x)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "A.b.1.2.output.1.3x4.npy"), X)
    write_dump(tmp_path / "A.c.1.2", outputs=[Tensor(nz(x), fmt=FRACTAL_NZ)])
    words = ["ascend", "convert", str(tmp_path / "A.c.1.2"), "-o", str(tmp_path / "o2")]
    assert main([*words, "--format", "ND", "--shape", "62,20", "--to", "safetensors"]) == 0
    stored = load_file(tmp_path / "o2" / "A.c.1.2.safetensors")
    np.testing.assert_array_equal(stored["output.0"], x)


def test_overflow_records_become_json(tmp_path: Path) -> None:
    write_dump(tmp_path / "Opdebug.Node_OpDebug.2.8.16", outputs=[Tensor(bytes(2048), dtype=4)])
    convert([tmp_path / "Opdebug.Node_OpDebug.2.8.16"], tmp_path / "out")
    text = (tmp_path / "out" / "Opdebug.Node_OpDebug.2.8.16.output.0.json").read_text()
    assert json.loads(text)["AI Core"]["status"] == 0


def test_a_directory_lists_failures_and_does_the_rest(tmp_path: Path, capsys) -> None:
    dumps = tmp_path / "dumps"
    for n in range(3):
        write_dump(dumps / "20230101" / "0" / f"Add.Add.{n}.0.16{n}", inputs=[Tensor(X + n)])
    cut = dump_bytes([Tensor(X)])[:-3]
    (dumps / "Mul.Mul.1.2").write_bytes(cut)
    (dumps / "notes.txt").write_text("not a dump")
    out = tmp_path / "out"
    assert main(["ascend", "convert", str(dumps), "-o", str(out)]) == 1
    said = capsys.readouterr()
    assert "3 of 4 dumps" in said.out
    assert "input.0 claims 48 bytes" in said.err
    assert [n for n in names(out) if n.endswith(".npy")] == [
        f"20230101/0/Add.Add.{n}.0.16{n}.input.0.npy" for n in range(3)
    ]
    assert "Mul.Mul.1.2" in (out / FAILED_LIST).read_text()
    np.testing.assert_array_equal(
        np.load(out / "20230101" / "0" / "Add.Add.2.0.162.input.0.npy"), X + 2
    )


def test_processes_give_the_same(tmp_path: Path) -> None:
    for n in range(4):
        write_dump(tmp_path / "d" / f"Add.Add.{n}.16", inputs=[Tensor(X + n)])
    (tmp_path / "d" / "Bad.Bad.1.2").write_bytes(b"x" * 30)
    seen: list[tuple[int, int]] = []
    done = convert(
        [tmp_path / "d"], tmp_path / "out", jobs=2, progress=lambda a, b: seen.append((a, b))
    )
    assert [len(r.written) for r in done.results] == [1, 1, 1, 1, 0]
    assert len(done.failed) == 1
    assert seen[-1][0] == seen[-1][1]
    for n in range(4):
        np.testing.assert_array_equal(
            np.load(tmp_path / "out" / f"Add.Add.{n}.16.input.0.npy"), X + n
        )


def test_a_script_without_main_guard_still_converts(tmp_path: Path) -> None:
    for n in range(2):
        write_dump(tmp_path / "d" / f"Add.Add.{n}.16", inputs=[Tensor(X + n)])
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from tensorprobe.ascend import dump_conversion as c\n"
        f"print(len(c.convert([Path({str(tmp_path / 'd')!r})], Path({str(tmp_path / 'o')!r}), "
        "jobs=2).failed))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip().endswith("0"), done.stderr
    assert len(names(tmp_path / "o")) == 2


def test_hostile_names_stay_inside(tmp_path: Path) -> None:
    dumps = tmp_path / "in"
    write_dump(dumps / "123", inputs=[Tensor(X)])
    write_dump(dumps / "456", inputs=[Tensor(X)])
    write_dump(dumps / "A\n..b.1.2", inputs=[Tensor(X)])
    (dumps / "mapping.csv").write_text("123,../../../evil\n456,/etc/evil\n")
    out = tmp_path / "sub" / "out"
    convert([dumps], out)
    assert all("evil" not in str(p) for p in tmp_path.rglob("*") if out not in p.parents)
    assert not Path("/etc/evil.input.0.npy").exists()
    assert len([n for n in names(out) if n.endswith(".npy")]) == 3


def test_links_in_out_lead_nowhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_dump(tmp_path / "in" / "A.b.1.2", inputs=[Tensor(X)])
    write_dump(tmp_path / "in" / "deep" / "A.c.1.2", inputs=[Tensor(X)])
    out = tmp_path / "out"
    out.mkdir()
    (out / "A.b.1.2.input.0.npy").symlink_to(victim)
    (out / "deep").symlink_to(elsewhere)
    done = convert([tmp_path / "in"], out)
    assert victim.read_text() == "mine"
    assert list(elsewhere.iterdir()) == []
    assert not (out / "A.b.1.2.input.0.npy").is_symlink()
    assert "leads out" in str(done.failed[0].error)


def test_a_linked_file_in_a_dump_directory_is_not_followed(tmp_path: Path) -> None:
    secret = write_dump(tmp_path / "secret" / "A.b.1.2", inputs=[Tensor(X)])
    (tmp_path / "in").mkdir()
    os.symlink(secret, tmp_path / "in" / "A.link.1.2")
    write_dump(tmp_path / "in" / "A.c.1.2", inputs=[Tensor(X)])
    conversion = convert([tmp_path / "in"], tmp_path / "out")
    assert [r.path.name for r in conversion.results if r.written] == ["A.c.1.2"]
    (refused,) = conversion.failed
    assert refused.error == (
        f"{tmp_path / 'in' / 'A.link.1.2'}: a link that leads out of its folder, to {secret}; "
        "copy the file there"
    )


def test_names_too_long_for_a_file_go_to_mapping_csv(tmp_path: Path) -> None:
    long = f"Fused.{'a' * 230}.3.1638329841577837"
    write_dump(tmp_path / "in" / long, inputs=[Tensor(X)])
    convert([tmp_path / "in"], tmp_path / "out")
    with (tmp_path / "out" / "mapping.csv").open() as file:
        (short, original), *_ = csv.reader(file)
    assert original == f"{long}.input.0.npy"
    np.testing.assert_array_equal(np.load(tmp_path / "out" / short), X)


def test_two_dumps_never_write_one_file(tmp_path: Path) -> None:
    for side in ("a", "b"):
        write_dump(tmp_path / side / "A.b.1.2", inputs=[Tensor(X)])
    with pytest.raises(BadUsage, match="would write the same files"):
        convert([tmp_path / "a" / "A.b.1.2", tmp_path / "b" / "A.b.1.2"], tmp_path / "out")


def test_names_that_are_no_text(tmp_path: Path, capsys) -> None:
    name = os.fsdecode(b"A.\xff\xfe.1.2")
    write_dump(tmp_path / "in" / name, inputs=[Tensor(X)])
    (tmp_path / "in" / "A.\x1b[31m.1.2").write_bytes(b"no dump at all")
    assert main(["ascend", "convert", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 1
    np.testing.assert_array_equal(np.load(tmp_path / "out" / f"{name}.input.0.npy"), X)
    said = capsys.readouterr()
    assert "\x1b" not in said.err
    assert r"A.\x1b[31m.1.2" in said.err


def test_wrong_usage(tmp_path: Path, capsys) -> None:
    with pytest.raises(BadUsage, match="no such file or directory"):
        convert([tmp_path / "absent"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert main(["ascend", "convert", str(tmp_path / "empty"), "-o", str(tmp_path / "o")]) == 2
    assert "no dump file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["ascend", "convert", "x", "-o", "y", "--shape", "1,b"])
    assert caught.value.code == 2


def test_help_is_fast_and_needs_no_torch() -> None:
    code = (
        "import sys, tensorprobe.cli.main as m\n"
        "try: m.main(['ascend', 'convert', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0
