"""Dump files to npy, bin or safetensors, one or a directory of them, in parallel."""

from __future__ import annotations

import csv
import io
import json
import math
import multiprocessing
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tensorprobe.ascend.artefact_files import found_below, open_file
from tensorprobe.ascend.dump import Dump, DumpTensor, original_name, parse_dump_name, read_dump
from tensorprobe.ascend.element_types import kind_of, widened
from tensorprobe.ascend.memory_formats import to_plain
from tensorprobe.ascend.opdebug import parse_opdebug
from tensorprobe.ascend.writing import (
    bytes_of,
    folder_inside,
    safe_name,
    whole_file,
    write_all,
    write_text,
)
from tensorprobe.errors import BadArtefact, BadUsage, TensorprobeError
from tensorprobe.terminal import printable

Array = np.ndarray[Any, Any]
OutputType = Literal["npy", "bin", "safetensors"]

FAILED_LIST = "convert_failed_file_list.txt"
MAPPING = "mapping.csv"
# Bytes decoded at a time. Memory stays small for any tensor, and temporaries stay below the 128 KiB
# from which malloc maps fresh pages each time: 64 KiB is 5 times as fast as 256 KiB.
_CHUNK = 3 << 13  # a whole number of elements, also of those with 6 bits
# Below this much data, starting processes (half a second) costs more than it saves: one of them
# already copies as fast as the disk cache takes it.
_WORTH_PROCESSES = 2 << 30
# Never dumps, whatever their content: what else lies in a folder of dumps.
_OTHER_SUFFIXES = {
    ".npy", ".npz", ".csv", ".json", ".txt", ".pbtxt", ".log", ".o", ".cce", ".py", ".safetensors",
    ".pt", ".md", ".gz", ".zip", ".core", ".xlsx", ".html", ".jsonl", ".pkl",
}  # fmt: skip


class ConversionPlan(msgspec.Struct, frozen=True):
    """What to make of each tensor: the file type, and another memory format where asked for."""

    to: OutputType = "npy"
    format: str | None = None
    shape: tuple[int, ...] | None = None
    index: int | None = None


class Converted(msgspec.Struct, frozen=True):
    """One dump file's result: what was written, or why nothing was."""

    path: Path
    written: tuple[Path, ...] = ()
    nbytes: int = 0
    warnings: tuple[str, ...] = ()
    error: str | None = None
    renamed: tuple[tuple[Path, str], ...] = ()


class Conversion(msgspec.Struct, frozen=True):
    """The results of a run over many files, and how many files were no dumps by their names."""

    results: tuple[Converted, ...]
    skipped: int

    @property
    def failed(self) -> tuple[Converted, ...]:
        return tuple(result for result in self.results if result.error is not None)

    @property
    def nbytes(self) -> int:
        return sum(result.nbytes for result in self.results)


def convert(
    paths: Sequence[Path],
    out: Path,
    plan: ConversionPlan | None = None,
    *,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Convert dump files and directories of them (to any depth) into `out`.

    A file that cannot be read is listed in `convert_failed_file_list.txt`, and the rest is done.
    With `jobs` processes; by default one a core when there is enough to do for them.
    `progress` is called with the bytes done and the bytes in all.
    """
    plan = plan or ConversionPlan()
    work, refused, skipped = _collect(paths, out)
    if not work and not refused:
        raise BadUsage(
            f"no dump file in {', '.join(map(str, paths))}"
            + (f" ({skipped} other files were passed over)" if skipped else "")
        )
    out.mkdir(parents=True, exist_ok=True)
    total = sum(_nbytes(path) for path, _ in work)
    if jobs is None:
        jobs = min(os.cpu_count() or 1, 16) if total >= _WORTH_PROCESSES else 1
    serial = min(jobs, len(work)) < 2
    run = _serial(work, out, plan) if serial else _parallel(work, out, plan, jobs)
    results: dict[Path, Converted] = {}
    done = 0
    for result in run:
        results[result.path] = result
        done += _nbytes(result.path)
        if progress is not None:
            progress(done, total)
    ordered = tuple(results[path] for path, _ in work)
    conversion = Conversion((*ordered, *refused), skipped)
    _write_lists(out, conversion)
    return conversion


def _nbytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


_Work = list[tuple[Path, Path]]


def _collect(paths: Sequence[Path], out: Path) -> tuple[_Work, list[Converted], int]:
    """Each dump file with its folder below `out`, those refused, and the number of other files."""
    work: dict[Path, Path] = {}
    refused: list[Converted] = []
    skipped = 0
    inside = out.resolve()
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise BadUsage(f"{path}: no such file or directory")
            work[path] = Path()
            continue
        for file, problem in found_below(path, lambda _: True, skip=inside):
            if not is_candidate(file):
                skipped += 1
            elif problem is not None:
                refused.append(Converted(file, error=problem))
            else:
                work[file] = file.parent.relative_to(path)
    targets: dict[Path, Path] = {}
    for path, below in work.items():
        other = targets.setdefault(below / safe_name(original_name(path)), path)
        if other != path:
            raise BadUsage(f"{other} and {path} would write the same files: use two -o")
    return list(work.items()), refused, skipped


def is_candidate(file: Path) -> bool:
    """Whether a file in a directory may be a dump, by its name alone."""
    named = parse_dump_name(file.name) is not None or file.name.isdigit()
    is_other = file.name.startswith(".") or file.suffix.lower() in _OTHER_SUFFIXES
    return named or not is_other


def _serial(
    work: Iterable[tuple[Path, Path]], out: Path, plan: ConversionPlan
) -> Iterator[Converted]:
    for path, folder in work:
        yield convert_file(path, out, folder, plan)


def _parallel(
    work: Sequence[tuple[Path, Path]], out: Path, plan: ConversionPlan, jobs: int
) -> Iterator[Converted]:
    # spawn: a fork of a process with threads (torch, BLAS) may hang.
    context = multiprocessing.get_context("spawn")
    left = dict(work)
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            futures = [pool.submit(convert_file, path, out, folder, plan) for path, folder in work]
            for future in as_completed(futures):
                result = future.result()
                del left[result.path]
                yield result
        except BrokenProcessPool:
            # A caller's script without an `if __name__ == "__main__"` cannot be spawned from.
            pass
    yield from _serial(left.items(), out, plan)


def convert_file(path: Path, out: Path, folder: Path, plan: ConversionPlan) -> Converted:
    """Convert one dump into `out/folder`; what goes wrong is in the result."""
    try:
        target = folder_inside(out, folder)
        return _TensorFileWriter(path, target, plan).run()
    except (TensorprobeError, OSError) as error:
        return Converted(path, error=str(error))
    except Exception as error:  # noqa: BLE001 - one foreign file must not end the run over the rest
        return Converted(path, error=f"{path}: {type(error).__name__}: {error}")


class _TensorFileWriter:
    def __init__(self, path: Path, target: Path, plan: ConversionPlan) -> None:
        self.path = path
        self.target = target
        self.plan = plan
        self.name = safe_name(original_name(path))
        self.written: list[Path] = []
        self.renamed: list[tuple[Path, str]] = []
        self.nbytes = 0
        self.warnings: list[str] = []

    def run(self) -> Converted:
        dump = read_dump(self.path)
        self.warnings += dump.warnings
        for tensor in dump.tensors:
            self.warnings += (f"{tensor.name}: {warning}" for warning in tensor.warnings)
        name = parse_dump_name(self.name)
        if name is not None and name.is_overflow:
            self._write_overflow(dump)
        elif self.plan.to == "safetensors":
            self._write_safetensors(dump)
        else:
            for tensor in dump.tensors:
                if self.plan.index is None or tensor.index == self.plan.index:
                    self._write_tensor(tensor)
        return Converted(
            self.path, tuple(self.written), self.nbytes, tuple(self.warnings), None,
            tuple(self.renamed),
        )  # fmt: skip

    def _open(self, suffix: str) -> AbstractContextManager[io.FileIO]:
        name = self.name + suffix
        if len(os.fsencode(name)) >= 255:
            seed = name.encode("utf-8", "backslashreplace").decode()
            short = uuid.uuid3(uuid.NAMESPACE_DNS, seed).hex + Path(suffix).suffix
            self.renamed.append((self.target / short, name))
            name = short
        self.written.append(self.target / name)
        return whole_file(self.target / name)

    def _write_overflow(self, dump: Dump) -> None:
        for tensor in dump.role("output"):
            text = json.dumps(parse_opdebug(tensor), indent=4) + "\n"
            with self._open(f".{tensor.name}.json") as file:
                write_all(file, text.encode())
            self.nbytes += tensor.nbytes

    def _write_tensor(self, tensor: DumpTensor) -> None:
        self.nbytes += tensor.nbytes
        if tensor.role in ("l1buffer", "space"):
            with self._open(f".{tensor.name}.bin") as file:
                _copy_block(file, tensor, tensor.nbytes)
        elif self.plan.format is not None:
            self._write_plain(tensor, self.plan.format)
        elif self.plan.to == "bin":
            shape = "_".join(map(str, tensor.shape))
            with self._open(f".{tensor.name}.{shape}.{tensor.dtype}.{tensor.format}.bin") as file:
                _copy_block(file, tensor, _content_nbytes(tensor))
        else:
            with self._open(f".{tensor.name}.npy") as file:
                _write_npy(file, tensor)

    def _write_plain(self, tensor: DumpTensor, target: str) -> None:
        if not tensor.fits:
            raise BadArtefact(
                f"{self.path}: {tensor.name}: {'; '.join(tensor.warnings)}. Its format cannot "
                "be changed; convert without --format"
            )
        array = to_plain(
            widened(tensor.array()),
            tensor.format,
            target,
            original_shape=self.plan.shape or tensor.original_shape,
        )
        shape = "x".join(map(str, array.shape))
        if self.plan.to == "bin":
            with self._open(f".{tensor.name}.{shape}.bin") as file:
                write_all(file, bytes_of(array))
        else:
            with self._open(f".{tensor.name}.{shape}.npy") as file:
                write_all(file, npy_header(array.dtype, array.shape))
                write_all(file, bytes_of(array))

    def _write_safetensors(self, dump: Dump) -> None:
        blocks = [_safetensors_block(tensor, self.plan) for tensor in dump.tensors]
        with self._open(".safetensors") as file:
            write_all(file, _safetensors_header(dump, blocks))
            for tensor, (_, _, nbytes, array) in zip(dump.tensors, blocks, strict=True):
                self.nbytes += tensor.nbytes
                if array is None:
                    _copy_block(file, tensor, nbytes)
                else:
                    write_all(file, bytes_of(array))


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The head of an npy file; its content follows in row-major order."""
    buffer = io.BytesIO()
    head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, head)
    return buffer.getvalue()


def _content_nbytes(tensor: DumpTensor) -> int:
    """The bytes of the elements that the shape asks for: blocks may be padded, or cut off."""
    return -(-math.prod(_npy_shape(tensor)) * kind_of(tensor.dtype).bits // 8)


def _npy_shape(tensor: DumpTensor) -> tuple[int, ...]:
    if not tensor.fits:
        return (tensor.nbytes * 8 // kind_of(tensor.dtype).bits,)
    return tensor.shape or (1,)  # as the vendor's tool writes a scalar


def _write_npy(file: io.FileIO, tensor: DumpTensor) -> None:
    kind = kind_of(tensor.dtype)
    write_all(file, npy_header(kind.wide, _npy_shape(tensor)))
    if kind.is_plain:
        _copy_block(file, tensor, _content_nbytes(tensor))
        return
    raw = tensor.raw()[: _content_nbytes(tensor)]
    left = math.prod(_npy_shape(tensor))
    for at in range(0, len(raw), _CHUNK):
        part = kind.decode(np.ascontiguousarray(raw[at : at + _CHUNK]))[:left]
        write_all(file, bytes_of(widened(part)))
        left -= len(part)
        if left <= 0:
            break


def _copy_block(file: io.FileIO, tensor: DumpTensor, nbytes: int) -> None:
    """The block as it is, inside the kernel where it can be: no pass through this process."""
    with open_file(tensor.path) as dump:
        at, end = tensor.offset, tensor.offset + nbytes
        while at < end:
            try:
                copied = os.copy_file_range(dump.fileno(), file.fileno(), end - at, at)
            except (AttributeError, OSError):
                break
            if copied == 0:
                break
            at += copied
        file.seek(0, os.SEEK_END)
        dump.seek(at)
        while at < end:
            data = dump.read(min(1 << 22, end - at))
            if not data:
                raise BadArtefact(f"{tensor.path}: at byte {at}: the file became shorter")
            write_all(file, data)
            at += len(data)


# The format is 8 bytes of length, a JSON header and the data: written here by hand, because the
# library is no dependency of this project and would want every array in memory at once.
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32",
    "uint16": "U16", "uint8": "U8", "bool": "BOOL", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3", "complex64": "C64",
}  # fmt: skip
_Block = tuple[str, tuple[int, ...], int, "Array | None"]


def _safetensors_block(tensor: DumpTensor, plan: ConversionPlan) -> _Block:
    """Type, shape, bytes, and the array where the block cannot be copied as it is."""
    code = _SAFETENSORS.get(tensor.dtype)
    reordered = plan.format is not None and tensor.role in ("input", "output")
    if code is not None and not reordered:
        shape = tensor.shape if tensor.fits else _npy_shape(tensor)
        return code, shape, _content_nbytes(tensor), None
    array = tensor.array()
    if reordered:
        array = to_plain(
            array, tensor.format, plan.format or "ND",
            original_shape=plan.shape or tensor.original_shape,
        )  # fmt: skip
    if code is None:
        array = widened(array)
        if array.dtype == np.complex128:  # no such type there: a last axis of two
            array = np.ascontiguousarray(array)[..., None].view(np.float64)
        code = _SAFETENSORS[array.dtype.name]
    return code, array.shape, array.nbytes, array


def _safetensors_header(dump: Dump, blocks: list[_Block]) -> bytes:
    header: dict[str, Any] = {
        "__metadata__": {
            "op_name": dump.op_name,
            **{f"{t.name}.dtype": t.dtype for t in dump.tensors},
            **{f"{t.name}.format": t.format for t in dump.tensors},
        }
    }
    at = 0
    for tensor, (code, shape, nbytes, _) in zip(dump.tensors, blocks, strict=True):
        header[tensor.name] = {
            "dtype": code, "shape": list(shape), "data_offsets": [at, at + nbytes]
        }  # fmt: skip
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_lists(out: Path, conversion: Conversion) -> None:
    if conversion.failed:
        lines = (printable(f"{r.path}") + "\t" + printable(f"{r.error}") for r in conversion.failed)
        write_text(out / FAILED_LIST, "".join(f"{line}\n" for line in lines))
    else:
        (out / FAILED_LIST).unlink(missing_ok=True)
    tables: dict[Path, io.StringIO] = {}
    for result in conversion.results:
        for path, name in result.renamed:
            table = tables.setdefault(path.parent, io.StringIO())
            csv.writer(table, lineterminator="\n").writerow((path.name, name))
    for folder, table in tables.items():
        write_text(folder / MAPPING, table.getvalue())
