"""A kernel's files in kernel_meta: binary, json, source and line tables, and what they say."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.ascend.artefact_files import files_below, open_file, read_file, require_file
from tensorprobe.ascend.graph import kernel_base
from tensorprobe.errors import BadArtefact

_SUFFIXES = ("_loc.json", ".o.txt", ".json", ".cce", ".o")
_MAX_JSON = 1 << 23
_MAX_TEXT = 1 << 26
_MAX_LINE = 1 << 12


class KernelFiles(msgspec.Struct, frozen=True):
    """The files of one kernel; None for those that are not there."""

    base: str
    binary: Path | None = None
    json_path: Path | None = None
    cce: Path | None = None
    loc: Path | None = None
    objdump: Path | None = None
    info: dict[str, Any] = {}

    @property
    def is_dynamic(self) -> bool:
        return bool(self.info.get("compileInfo")) or bool(self.info.get("opParaSize"))

    @property
    def zeroed_arguments(self) -> list[int]:
        """Arguments that must be zero before the launch: a clean runs before the kernel."""
        parameters = self.info.get("parameters")
        if not isinstance(parameters, list):
            return []
        return [at for at, value in enumerate(parameters) if isinstance(value, dict)]


class FaultPlace(msgspec.Struct, frozen=True):
    """Where in the kernel the core stopped, as far as the files tell."""

    offset: int
    refined_offset: int | None = None
    cce_line: int | None = None
    cce_text: str | None = None
    python_file: str | None = None
    python_line: int | None = None
    instructions: tuple[str, ...] = ()


class KernelFolder:
    """An index of all kernel files below some directories. Names are looked up, never joined."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files: dict[str, dict[str, Path]] = {}
        for path in paths:
            if path.is_dir():
                for file in files_below(path, lambda f: f.name.endswith(_SUFFIXES), links=True):
                    self._add(file)
            else:
                require_file(path, "--kernel-meta")
                self._add(path)
        self._by_function: dict[str, str] | None = None

    def _add(self, path: Path) -> None:
        for suffix in _SUFFIXES:
            if path.name.endswith(suffix):
                self.files.setdefault(path.name[: -len(suffix)], {}).setdefault(suffix, path)
                return

    def find(self, functions: Iterable[str]) -> KernelFiles | None:
        """The kernel of the first name that has files, by the ways its files may be named."""
        for function in functions:
            base = kernel_base(function)
            without_key = re.sub(r"_\d+$", "", base)
            for name in (base, self._functions().get(function), self._functions().get(base)):
                if name in self.files and self._is_kernel(name):
                    return self._kernel(name)
            if without_key in self.files and self._is_kernel(without_key):
                return self._kernel(without_key)
        return None

    def like(self, function: str) -> list[str]:
        """Kernels of the same operator and source: all but the last hash of the name agrees."""
        base = kernel_base(function)
        stem = re.match(r"^(te_[A-Za-z0-9]+|[A-Za-z]\w*?)_[0-9a-f]{6,}", base)
        prefix = stem[1] if stem else base.split("_")[0]
        return sorted(
            name
            for name in self.files
            if name != base and name.startswith(f"{prefix}_") and self._is_kernel(name)
        )

    def _is_kernel(self, name: str) -> bool:
        return ".o" in self.files[name] or ".json" in self.files[name]

    def _functions(self) -> dict[str, str]:
        if self._by_function is None:
            table: dict[str, str] = {}
            for name, files in self.files.items():
                if ".json" not in files:
                    continue
                info = _load(files[".json"])
                listed = info.get("kernelList")
                entries = [info, *(listed if isinstance(listed, list) else [])]
                for entry in entries:
                    function = entry.get("kernelName") if isinstance(entry, dict) else None
                    if isinstance(function, str):
                        table.setdefault(function, name)
            self._by_function = table
        return self._by_function

    def _host_copy(self, base: str) -> Path | None:
        """An exception dump has the binary as the host loaded it: K_host.o, K_TILINGKEY_host.o."""
        for name in sorted(self.files):
            if re.fullmatch(rf"{re.escape(base)}(?:_\d+)?_host", name):
                return self.files[name].get(".o")
        return None

    def _kernel(self, base: str) -> KernelFiles:
        files = self.files[base]
        path = files.get(".json")
        binary = files.get(".o") or self._host_copy(base)
        return KernelFiles(
            base, binary, path, files.get(".cce"), files.get("_loc.json"), files.get(".o.txt"),
            _load(path) if path is not None else {},
        )  # fmt: skip


def _load(path: Path) -> dict[str, Any]:
    """A kernel's json; one that is damaged says nothing, which the checks then report."""
    try:
        value = json.loads(read_file(path, _MAX_JSON, "a kernel's json"))
    except (ValueError, RecursionError, OSError, BadArtefact):
        return {}
    return value if isinstance(value, dict) else {}


def check_kernel(kernel: KernelFiles, input_count: int, output_count: int) -> list[str]:
    """What does not fit together about a kernel's files."""
    warnings = []
    if kernel.json_path is None:
        warnings.append(f"{kernel.base}.json is missing: it must lie beside the .o")
    elif not kernel.info:
        warnings.append(f"{kernel.json_path} is no kernel json")
    else:
        stated = kernel.info.get("kernelName")
        function = stated if isinstance(stated, str) else ""
        if kernel_base(function) != kernel.base:
            warnings.append(
                f"{kernel.json_path.name} names kernel {function}, its own name says {kernel.base}"
            )
        parameters = kernel.info.get("parameters")
        wanted = input_count + output_count
        if isinstance(parameters, list) and len(parameters) < wanted:
            warnings.append(
                f"the kernel takes {len(parameters)} arguments, the op has {input_count} inputs "
                f"and {output_count} outputs"
            )
    if kernel.binary is None:
        warnings.append(f"{kernel.base}.o is missing: the case cannot run without it")
    else:
        with open_file(kernel.binary) as file:
            if file.read(4) != b"\x7fELF":
                warnings.append(f"{kernel.binary} is no ELF file")
        if kernel.json_path is not None and kernel.json_path.parent != kernel.binary.parent:
            warnings.append(f"{kernel.json_path} does not lie beside {kernel.binary}")
    return warnings


# --- where it stopped -----------------------------------------------------------------------

_CCE_LINE = re.compile(r"\S\.(?:cce|cpp|h|hpp|cc):(?P<line>\d{1,9})")
_INSTRUCTION = re.compile(r"^\s*(?P<offset>[0-9a-fA-F]+):\s")
_PC_UNITS = ("vec", "mte", "ccu", "cube")


def pc_offset(start: int, current: int) -> int:
    """How far into the kernel. Only the low 20 bits of the two registers are comparable."""
    return ((current & 0xFFFFF) - (start & 0xFFFFF)) % 0x100000


def refined_offset(
    start: int, current: int, units: Iterable[str], registers: dict[str, int]
) -> int | None:
    """The instruction itself: the unit that failed kept bits 9:2 of its pc in its register."""
    for unit in units:
        value = registers.get(f"{unit} error info")
        if unit in _PC_UNITS and value:
            pc = (current & ~0x3FF) | (value & 0xFF) << 2
            if pc > current:
                pc -= 0x400
            return pc_offset(start, pc)
    return None


def locate(
    kernel: KernelFiles | None, offset: int, refined: int | None, objdump: Path | None = None
) -> FaultPlace:
    """The CCE and Python line of an offset, given an object dump with line numbers."""
    place = FaultPlace(offset, refined)
    table = objdump or (kernel.objdump if kernel is not None else None)
    if table is None:
        return place
    line, instructions = _line_of(table, offset if refined is None else refined)
    place = msgspec.structs.replace(place, cce_line=line, instructions=instructions)
    if line is None or kernel is None:
        return place
    if kernel.cce is not None:
        place = msgspec.structs.replace(place, cce_text=_text_line(kernel.cce, line))
    if kernel.loc is not None:
        python = _python_line(kernel.loc, line)
        if python is not None:
            place = msgspec.structs.replace(place, python_file=python[0], python_line=python[1])
    return place


def _line_of(table: Path, offset: int) -> tuple[int | None, tuple[str, ...]]:
    line: int | None = None
    found: int | None = None
    recent: list[str] = []
    for text in _lines(table):
        if match := _INSTRUCTION.match(text):
            if int(match["offset"], 16) > offset:
                return found, tuple(recent)
            found = line
            recent = [*recent[-9:], text.strip()[:200]]
        elif match := _CCE_LINE.search(text):
            line = int(match["line"])
    # Beyond the last instruction: the dump is of another kernel.
    return None, ()


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file, each cut where it is longer than any that is of use."""
    with open_file(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > _MAX_TEXT:
            raise BadArtefact(f"{path}: {nbytes} bytes; expected at most {_MAX_TEXT} of text")
        is_rest = False
        while data := file.readline(_MAX_LINE):
            if not is_rest:
                yield data.decode("utf-8", "replace")
            is_rest = not data.endswith(b"\n")


def _text_line(path: Path, number: int) -> str | None:
    found = (text for at, text in enumerate(_lines(path), 1) if at == number)
    text = next(found, None)
    return None if text is None else text.strip()[:300]


def _python_line(path: Path, cce_line: int) -> tuple[str, int] | None:
    try:
        value = json.loads(read_file(path, _MAX_JSON, "a table of lines"))
    except (ValueError, RecursionError, BadArtefact):
        return None
    tables = value if isinstance(value, list) else [value]
    best: tuple[int, str, int] | None = None
    for table in tables:
        entries = table.get("cce_line2loc", []) if isinstance(table, dict) else []
        for entry in entries if isinstance(entries, list) else []:
            place = entry.get("loc") if isinstance(entry, dict) else None
            at = entry.get("cce_line") if isinstance(entry, dict) else None
            if not isinstance(at, int) or at > cce_line or not isinstance(place, list):
                continue
            if len(place) != 2 or not isinstance(place[0], str) or not place[0]:
                continue
            row = str(place[1]) if isinstance(place[1], int | str) else ""
            if re.fullmatch(r"\d{1,9}", row) and (best is None or at > best[0]):
                best = at, place[0], int(row)
    return (best[1], best[2]) if best is not None else None
