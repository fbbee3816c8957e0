"""Host logs of any year to faults: which kernel failed where, with every line that belongs to it.

Lines are searched, never anchored: frameworks put their own prefixes before them, terminals wrap
them, and guides escape them for markdown. Three writers print the same failure; it is one fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tensorprobe.ascend.artefact_files import files_below, open_file, require_file
from tensorprobe.ascend.dump import MAX_DIMS, parse_dump_name
from tensorprobe.ascend.element_types import dtype_of_name

MAX_LINE = 1 << 16
MAX_ALLOCATIONS = 2_000_000
# A fleet's logs have one or two errors a device; each is compared with all others.
MAX_FAULTS = 500
MAX_NODES = 5000
MAX_CORE_ERRORS = 1000
MAX_NOTES = 20
MAX_FILES = 200
MAX_ARGUMENTS = 1000
MAX_TILING = 1 << 20
_TOO_MANY = f"the logs have more than {MAX_FAULTS} AI Core errors: the rest was not looked at"


class CoreError(msgspec.Struct):
    """What one core said when it stopped."""

    core_id: int | None
    code: int
    code_text: str
    device_id: int | None = None
    kind: str = ""
    registers: dict[str, int] = {}
    text: str = ""
    is_number: bool = False  # the newest chips number their errors: the code is no set of bits

    @property
    def pc_start(self) -> int | None:
        return self.registers.get("pc start")

    @property
    def pc_current(self) -> int | None:
        return self.registers.get("current")


class LoggedTensor(msgspec.Struct, frozen=True):
    """An input or output as an [AIC_INFO] line describes it."""

    index: int
    shape: tuple[int, ...]
    dtype: str
    format: str
    address: int | None
    nbytes: int | None = None


class Argument(msgspec.Struct, frozen=True):
    """A tensor the exception dump took from the kernel's arguments."""

    index: int
    address: int
    nbytes: int


class FaultNode(msgspec.Struct):
    """The [AIC_INFO] lines of one fault: node, tensors, launch arguments."""

    name: str
    type: str
    stream_id: int | None = None
    task_id: int | None = None
    inputs: dict[int, LoggedTensor] = {}
    outputs: dict[int, LoggedTensor] = {}
    facts: dict[str, str] = {}


class Fault(msgspec.Struct):
    """One AI Core error and all that the logs say about it."""

    keys: dict[str, str]
    where: str
    order: int = 0
    pid: int | None = None
    time: str | None = None
    core_errors: list[CoreError] = []
    node: FaultNode | None = None
    args_before: list[int] = []
    args_after: dict[int, list[int]] = {}
    arguments: list[Argument] = []
    files: list[str] = []
    notes: list[str] = []

    def number(self, key: str) -> int | None:
        return _optional(self.keys.get(key))

    @property
    def device_id(self) -> int | None:
        known = [error.device_id for error in self.core_errors if error.device_id is not None]
        number = self.number("device_id")
        return number if number is not None else known[0] if known else None

    @property
    def stream_id(self) -> int | None:
        return self.number("stream_id")

    @property
    def task_id(self) -> int | None:
        return self.number("task_id")

    @property
    def kernel_name(self) -> str | None:
        return self.keys.get("fault kernel_name")

    @property
    def functions(self) -> list[str]:
        """Names of the device function, the surest first."""
        names = [self.keys.get("func_name"), self.keys.get("fault kernel info ext")]
        if self.node is not None:
            names.append(self.node.facts.get("dev_func"))
        return list(dict.fromkeys(name for name in names if name))


class Allocation(NamedTuple):
    """A DevMalloc (`nbytes` of it) or, with None, a DevFree."""

    order: int
    pid: int | None
    address: int
    nbytes: int | None


class LogFacts(msgspec.Struct):
    """All that was found in some log files."""

    faults: list[Fault]
    allocations: list[Allocation]
    aicpu_count: int
    cleaned_nodes: set[str]
    line_count: int
    files: list[Path]


def read_logs(paths: Sequence[Path]) -> LogFacts:
    """Search log files, and directories of them, for AI Core errors."""
    files = list(_log_files(paths))
    reader = _LogReader()
    for file in files:
        reader.read(file)
    return reader.facts(files)


_NO_LOGS = (".npy", ".bin", ".o", ".pbtxt", ".json", ".csv", ".pt", ".safetensors")


def _log_files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from filter(_is_text, files_below(path, lambda f: f.suffix not in _NO_LOGS))
        else:
            require_file(path, "--log")
            yield path


def _is_text(path: Path) -> bool:
    with open_file(path) as file:
        return b"\0" not in file.read(4096)


# --- the forms of lines ---------------------------------------------------------------------
# Every gap, name and number is bounded: a line that begins a pattern a thousand times must not cost
# its square, and a number of a thousand digits is none.

_ENVELOPE = re.compile(
    r"\[(?:ERROR|WARNING|INFO|EVENT|DEBUG|TRACE)\]\s*\w+\((?P<pid>-?\d{1,20}),[^)]{0,200}\):"
    r"(?P<time>\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d\.[\d.]+)"
)
_SCREEN = re.compile(r"\bE[A-Z\d]\d{4}\[PID:\s*(?P<pid>\d{1,20})\]\s*(?P<time>[\d:.-]*)")
_SCREEN_PLAIN = re.compile(r"\bE[A-Z\d]\d{4}: Inner Error")
_FAILURE = re.compile(
    r"(?:Aicore kernel execute failed|AI Core kernel execution failed|"
    r"fftsplus task execut\w+ failed|Fusion kernel execute failed)\s*[,.:]?(?P<rest>.*)",
    re.IGNORECASE,
)
_AICPU = re.compile(
    r"(?:Aicpu kernel execute failed|AI CPU kernel execution failed)", re.IGNORECASE
)
_KEY = re.compile(
    r"(?<!\w)(device_id|dev_id|stream_id|report_stream_id|task_id|flip_num|context_id|"
    r"thread_id|err_type|error_code|pc start|fault kernel_name|func_name|fault kernel info ext|"
    r"program id|hash|blockDim)\s*="
)
_CORE_ERROR = re.compile(
    r"The error from device\((?P<device>[^)]{0,80})\),\s*serial number is \d{1,20},\s*there is "
    r"(?:an? )?(?:error of |exception of )?(?P<kind>.{0,80}?),\s*core id is (?P<core>\d{1,20}),\s*"
    r"error code = (?P<code>0x[0-9a-fA-F]{1,64}|\d{1,20})(?P<rest>.*)"
)
_REGISTER = re.compile(
    r"([a-z][a-z0-9 ]{0,40}?): "
    r"((?:0x[0-9a-fA-F]{1,64}|\d{1,20})(?:,\s?0x[0-9a-fA-F]{1,64}){0,64})"
)
_ERROR_TEXT = re.compile(
    r"(?:error ?[sS]tr(?:ing)?\s*[:=]\s*)(?P<text>.{0,500}?)(?:\.\s|\.$|\[FUNC|$)"
)
_EXTEND = re.compile(r"The extend info: errcode:\((?P<codes>[^)]{0,200})\)(?P<rest>.*)")
_CORE_LIST = re.compile(
    r"The device\((?P<device>\d{1,20})\), core list\[[^\]]{0,80}\], error code is:"
)
_CORE_ID = re.compile(r"coreId\(\s*(\d{1,20})\):\s*(0x[0-9a-fA-F]{1,64}|\d{1,20})")
# One after the other: as one pattern, the gaps between them would multiply.
_OLD_DEVICE = tuple(
    re.compile(pattern)
    for pattern in (
        r"<exception_print>TIME:([\d:.-]{1,40})",
        r"device_id=(\d{1,20})",
        r"stream_id=(\d{1,20})",
        r"task_id=(\d{1,20})",
        r"AICORE_INFO_START:\s{0,80}core_id=(\d{1,20})",
    )
)
_OLD_REGISTER = re.compile(r"\b([A-Z][A-Z_0-9]*)=(0x[0-9a-fA-F]{1,64}|\d{1,20})")
_NODE = re.compile(
    r"\[AIC_INFO\] node_name:(?P<name>.{0,2000}?), node_type:(?P<type>[^,]{0,200})(?P<rest>.*)"
)
_TENSOR = re.compile(
    r"\[AIC_INFO\] (?P<side>input|output):(?P<index>\d{1,4});shape:\[(?P<shape>[^\]]{0,500})\];"
    r"format:(?P<format>[^;]{0,80});dtype:(?P<dtype>[^;]{0,80});"
    r"addr:(?P<address>0x[0-9a-fA-F]{1,64}|\d{1,20})(?:;size:(?P<size>\d{1,20}))?"
)
_ARGS = re.compile(
    r"\[AIC_INFO\] args(?:\((?P<start>\d{1,20}) to \d{1,20}\))? (?P<when>before|after) execute:"
    r"(?P<rest>.*)"
)
_FACT = re.compile(
    r"\[AIC_INFO\] (block_dim|workspace_bytes|workspace_addrs|all attrs|dev_func|tvm_magic|"
    r"kernel_info|tiling_key|tiling_data|op_file_path):(.*)"
)
_NUMBER = re.compile(r"0x[0-9a-fA-F]{1,64}|\d{1,20}")
_TILING_KEY = re.compile(r"tilingKey = (\d{1,20}),.{0,200}?blockDim=(\d{1,20})")
_DUMPED_FILE = re.compile(
    r"(?:exception dump file path is|dump exception to file, file:|dump host kernel to file, file:|"
    r"dump kernel json to file, file:|dump kernel\w* to file, file:)\s*(\S+)"
)
_LOADED_INDEX = re.compile(r"begin to load [\w ]{1,80}, index:(\d{1,20})")
_LOADED = re.compile(
    r"exception info dump args data, addr:(0x[0-9a-fA-F]{1,64}|\d{1,20}); ?size:(\d{1,20}) bytes"
)
_MALLOC = re.compile(
    r"DevMalloc: Succ,.{0,200}?size=(\d{1,20}).{0,200}?ptr=(0x[0-9a-fA-F]{1,64}|\d{1,20})"
)
_FREE = re.compile(r"DevFree: mem=(0x[0-9a-fA-F]{1,64}|\d{1,20})")
_SUSPECT = re.compile(r"(D2H failed|address maybe invalid)", re.IGNORECASE)
_ATOMIC = re.compile(r"AtomicLaunchKernelWithFlag_(\S{1,2000}?)[\s,.\]]")

# Only lines with one of these are looked at. Plain searches in blocks of bytes: one pattern of all
# words runs at 5 MB/s, and logs reach gigabytes. The last ones are those a markdown guide escapes.
_WORDS = (
    b"AIC_INFO", b"[Dump][Exc", b"DevMalloc: Succ", b"DevFree: mem", b"error from device",
    b"extend info: errcode", b"ernel execut", b"task execut", b"[PID:", b"Inner Error",
    b"core list[", b"coreId(", b"exception_print", b"tilingKey = ", b"D2H failed",
    b"address maybe invalid", b"AtomicLaunchKernel",
    b"AIC\\_INFO", b"\\[Dump", b"core list\\[", b"coreId\\(", b"exception\\_print", b"\\[PID",
)  # fmt: skip
_BLOCK = 1 << 18
_MARKDOWN = re.compile(r"\\([\\()\[\]_*#.<>{}|!+-])")
_WRAPPED = re.compile(r"\s{2,}")


def unescaped(line: str) -> str:
    """A line copied out of a markdown guide as it was in the log."""
    return _MARKDOWN.sub(r"\1", line).replace("**", "") if "\\" in line else line


def failure_keys(line: str) -> dict[str, str] | None:
    """The keys and values of a kernel-failure line; None when the line is no such one."""
    match = _FAILURE.search(line)
    if match is None:
        return None
    rest = match["rest"].split("[FUNC:")[0]
    found = list(_KEY.finditer(rest))
    keys: dict[str, str] = {}
    ends = [*(key.start() for key in found[1:]), len(rest)]
    for key, end in zip(found, ends, strict=False):
        value = rest[key.end() : end]
        value = value.strip(" ,;").split(",")[0].strip().removesuffix(".").strip()
        if key[1] in ("fault kernel_name", "func_name", "fault kernel info ext"):
            value = _WRAPPED.sub("", value)  # a terminal wrapped inside the name
        name = "device_id" if key[1] == "dev_id" else key[1]
        if value and value.lower() not in ("none", "(no result)"):
            keys.setdefault(name, value)
    return keys or None


def _integer(text: str) -> int:
    return int(text, 16) if text[:2] in ("0x", "0X") else int(text)


class _State:
    """What the lines of one process are about at the moment."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.pending: list[CoreError] = []
        self.node: FaultNode | None = None
        self.tiling = False
        self.loading = 0
        self.list_device: int | None = None
        self.args_before: list[int] = []

    def wait(self, error: CoreError) -> None:
        """Keep a core's error until the line that names the kernel."""
        if len(self.pending) < MAX_CORE_ERRORS:
            self.pending.append(error)


def _wanted_lines(block: bytes) -> list[tuple[int, int]]:
    """Start and end of the lines that have one of the words."""
    lines: dict[int, int] = {}
    for word in _WORDS:
        at = block.find(word)
        while at >= 0:
            end = block.find(b"\n", at) + 1 or len(block)
            lines[block.rfind(b"\n", 0, at) + 1] = end
            at = block.find(word, end)
    return sorted(lines.items())


class _LogReader:
    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.states: dict[int | None, _State] = {}
        self.allocations: list[Allocation] = []
        self.aicpu_count = 0
        self.order = 0  # of the line at hand, over all files
        self.first = 0  # lines in the files before
        self.screen_pid: int | None = None
        self.nodes: list[tuple[int | None, FaultNode]] = []
        self.atomic: set[str] = set()
        self.tiling: _State | None = None  # the one whose tiling data may go on in the next line

    def read(self, path: Path) -> None:
        self.screen_pid = None
        number = 1
        is_open = False  # the last line has no end
        with open_file(path) as file:
            while block := file.read(_BLOCK):
                if not block.endswith(b"\n"):
                    block += file.readline(MAX_LINE)
                counted = 0
                if not block.strip(b"\0"):  # a hole, of which a file may have gigabytes
                    is_open = True
                    continue
                for start, end in _wanted_lines(block):
                    number += block.count(b"\n", counted, start)
                    counted = start
                    self.order = self.first + number
                    line = block[start : min(end, start + MAX_LINE)].decode("utf-8", "replace")
                    self._line(unescaped(line.rstrip("\r\n")), f"{path}:{number}")
                    self._continued(block, end)
                number += block.count(b"\n", counted)
                is_open = not block.endswith(b"\n")
        self.first += number if is_open else number - 1
        # Core errors of a file without a kernel-failure line stand for a fault of their own.
        for pid, state in self.states.items():
            if state.pending:
                self._leftover(pid, state, path)

    def facts(self, files: list[Path]) -> LogFacts:
        for pid, node in self.nodes:
            self._place_node(pid, node)
        for fault in self.faults:
            fault.core_errors = _distinct(fault.core_errors)
        return LogFacts(
            self.faults, self.allocations, self.aicpu_count, self.atomic, self.first, files
        )

    # -- one line --

    def _line(self, line: str, where: str) -> None:
        envelope = _ENVELOPE.search(line)
        screen = None if envelope else _SCREEN.search(line)
        if screen:
            self.screen_pid = int(screen["pid"])
        elif not envelope and _SCREEN_PLAIN.search(line):
            self.screen_pid = None
        head = envelope or screen
        pid = int(head["pid"]) if head else self.screen_pid
        time = (head["time"] or None) if head else None
        state = self.states.setdefault(pid, _State())
        if "[AIC_INFO]" in line:
            state.tiling = False
            self._aic_info(line, pid, state)
        elif match := _MALLOC.search(line):
            self._allocate(pid, _integer(match[2]), int(match[1]))
        elif match := _FREE.search(line):
            self._allocate(pid, _integer(match[1]), None)
        elif match := _CORE_ERROR.search(line):
            state.wait(_core_error(match))
        elif match := _EXTEND.search(line):
            _extend(state, match)
        elif (keys := failure_keys(line)) is not None:
            self._failure(keys, pid, time, state, where)
        elif _AICPU.search(line):
            self.aicpu_count += 1
        elif match := _CORE_LIST.search(line):
            state.list_device = int(match["device"])
        elif found := _CORE_ID.findall(line):
            self._core_list(found, state)
        elif old := _old_device(line):
            self._old_device(old, line, where)
        else:
            self._details(line, state)

    def _details(self, line: str, state: _State) -> None:
        fault = state.fault
        if match := _ATOMIC.search(line):
            self.atomic.add(match[1])
        elif match := _LOADED_INDEX.search(line):
            state.loading = int(match[1])
        elif fault is None:
            return
        elif match := _LOADED.search(line):
            if len(fault.arguments) < MAX_ARGUMENTS:
                argument = Argument(state.loading, _integer(match[1]), int(match[2]))
                fault.arguments.append(argument)
        elif match := _DUMPED_FILE.search(line):
            owner = self._owner_of_dump(match[1], fault)
            if len(owner.files) < MAX_FILES and match[1] not in owner.files:
                owner.files.append(match[1])
        elif match := _TILING_KEY.search(line):
            fault.keys.setdefault("tiling_key", match[1])
            fault.keys.setdefault("blockDim", match[2])
        elif match := _SUSPECT.search(line):
            note = line[match.start() :][:200]
            if len(fault.notes) < MAX_NOTES and note not in fault.notes:
                fault.notes.append(note)

    def _owner_of_dump(self, path: str, fault: Fault) -> Fault:
        name = parse_dump_name(path.rsplit("/", 1)[-1])
        if name is not None and name.task_id is not None and name.task_id != fault.task_id:
            for other in reversed(self.faults):
                if other.pid == fault.pid and other.task_id == name.task_id:
                    return other
        return fault

    def _continued(self, block: bytes, at: int) -> None:
        """Tiling data spans lines, and only such lines are nothing but bytes."""
        state = self.tiling
        while state is not None and state.tiling and state.node is not None:
            end = block.find(b"\n", at) + 1 or len(block)
            line = block[at:end].decode("utf-8", "replace").strip()
            if not re.fullmatch(r"0x[0-9a-fA-F]{1,2}(?:\s+0x[0-9a-fA-F]{1,2})*", line):
                state.tiling = False
                return
            self._tile(state.node, line)
            at = end

    def _tile(self, node: FaultNode, text: str) -> None:
        before = node.facts.get("tiling_data", "")
        if len(before) < MAX_TILING:
            node.facts["tiling_data"] = f"{before} {text}".strip()

    def _allocate(self, pid: int | None, address: int, nbytes: int | None) -> None:
        if len(self.allocations) < MAX_ALLOCATIONS:
            self.allocations.append(Allocation(self.order, pid, address, nbytes))

    # -- faults --

    def _failure(
        self, keys: dict[str, str], pid: int | None, time: str | None, state: _State, where: str
    ) -> None:
        fault = self._known(keys, pid)
        if fault is None:
            fault = self._new(Fault(keys, where, self.order, pid, time))
        else:
            fault.keys = {**keys, **fault.keys}
            if fault.pid is None and pid is not None:  # the log knows when, the screen does not
                fault.pid, fault.time, fault.where, fault.order = pid, time, where, self.order
        fault.core_errors += state.pending[: MAX_CORE_ERRORS - len(fault.core_errors)]
        if state.args_before and not fault.args_before:
            fault.args_before = state.args_before
        state.pending = []
        state.fault = fault

    def _new(self, fault: Fault) -> Fault:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(fault)
        elif not any(_TOO_MANY in known.notes for known in self.faults[-1:]):
            self.faults[-1].notes.append(_TOO_MANY)
        return fault

    def _known(self, keys: dict[str, str], pid: int | None) -> Fault | None:
        same = ("device_id", "stream_id", "task_id", "fault kernel_name", "context_id")
        # Beyond the limit with neighbours only: what is printed twice is mostly printed at once.
        near = self.faults if len(self.faults) < MAX_FAULTS else self.faults[-16:]
        for fault in reversed(near):
            if pid is not None and fault.pid is not None and pid != fault.pid:
                continue
            flips = {keys.get("flip_num"), fault.keys.get("flip_num")} - {None}
            if len(flips) < 2 and all(_agree(keys, fault.keys, key) for key in same):
                return fault
        return None

    def _leftover(self, pid: int | None, state: _State, path: Path) -> None:
        last = state.fault
        if last is None:  # a second log of the same run may have come first
            last = next((f for f in reversed(self.faults) if pid is None or f.pid is None), None)
        known = {_identity(e) for e in last.core_errors} if last is not None else set()
        if last is not None and (
            not known or all(_identity(error) in known for error in state.pending)
        ):
            last.core_errors += state.pending
        else:
            fault = Fault({}, str(path), self.order, pid, None, core_errors=state.pending)
            fault.notes.append("the log has the cores' errors and no line that names the kernel")
            self._new(fault)
        state.pending = []

    def _core_list(self, found: Iterable[tuple[str, str]], state: _State) -> None:
        for core, code in found:
            value = _integer(code)
            if value:
                state.wait(CoreError(int(core), value, hex(value), state.list_device))

    def _old_device(self, found: list[re.Match[str]], line: str, where: str) -> None:
        time, device, stream, task, core = (match[1] for match in found)
        rest = line[found[-1].end() :]
        registers = {name: _integer(value) for name, value in _OLD_REGISTER.findall(rest)}
        code = registers.pop("AIC_ERROR", 0)
        names = {"PC_START": "pc start", "CURRENT_PC": "current"}
        error = CoreError(
            int(core), code, hex(code), int(device), "aicore error",
            {names.get(k, k.replace("_ERR_INFO", " error info").lower()): v
             for k, v in registers.items()},
        )  # fmt: skip
        keys = {"device_id": device, "stream_id": stream, "task_id": task}
        fault = self._known(keys, None)
        if fault is None:
            fault = self._new(Fault(keys, where, self.order, None, time))
        if len(fault.core_errors) < MAX_CORE_ERRORS:
            fault.core_errors.append(error)

    # -- [AIC_INFO] --

    def _aic_info(self, line: str, pid: int | None, state: _State) -> None:
        if match := _NODE.search(line):
            ids = dict(re.findall(r"(\w{1,40}):(\d{1,20})", match["rest"]))
            state.node = FaultNode(
                match["name"], match["type"].strip(), _optional(ids.get("stream_id")),
                _optional(ids.get("task_id")),
            )  # fmt: skip
            if len(self.nodes) < MAX_NODES:
                self.nodes.append((pid, state.node))
        elif match := _ARGS.search(line):
            self._arguments(match, pid, state)
        elif state.node is None:
            return
        elif match := _TENSOR.search(line):
            side = state.node.inputs if match["side"] == "input" else state.node.outputs
            side[int(match["index"])] = LoggedTensor(
                int(match["index"]),
                tuple(int(n) for n in re.findall(r"-?\d{1,20}", match["shape"])[:MAX_DIMS]),
                dtype_of_name(match["dtype"]),
                match["format"],
                _integer(match["address"]),
                _optional(match["size"]),
            )
        elif match := _FACT.search(line):
            state.tiling = match[1] == "tiling_data"
            if state.tiling:
                self._tile(state.node, match[2].strip())
                self.tiling = state
            else:
                state.node.facts[match[1]] = match[2].strip()

    def _arguments(self, match: re.Match[str], pid: int | None, state: _State) -> None:
        text = match["rest"].split("addr:")[0]
        values = [_integer(number) for number in _NUMBER.findall(text)[:MAX_ARGUMENTS]]
        if match["when"] == "before":
            if state.fault is not None:
                state.fault.args_before = values
            else:
                state.args_before = values
        elif state.fault is not None and len(state.fault.args_after) < MAX_ARGUMENTS:
            state.fault.args_after[int(match["start"] or 0)] = values

    def _place_node(self, pid: int | None, node: FaultNode) -> None:
        same = [f for f in self.faults if pid is None or f.pid is None or f.pid == pid]
        exact = [
            f
            for f in same
            if f.task_id == node.task_id
            and node.stream_id in (f.stream_id, f.number("report_stream_id"))
        ]
        by_task = [f for f in same if f.task_id is not None and f.task_id == node.task_id]
        for fault in exact or by_task or (same if len(same) == 1 else []):
            if fault.node is None or not fault.node.inputs:
                fault.node = node
                break


def _agree(left: dict[str, str], right: dict[str, str], key: str) -> bool:
    return key not in left or key not in right or left[key] == right[key]


def _optional(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) <= 20 else None


def _old_device(line: str) -> list[re.Match[str]] | None:
    """The five parts of an old device line, each soon after the one before."""
    found: list[re.Match[str]] = []
    at = end = 0
    for pattern in _OLD_DEVICE:
        match = pattern.search(line, at, end or len(line))
        if match is None:
            return None
        found.append(match)
        at, end = match.end(), match.end() + 500
    return found


def _core_error(match: re.Match[str]) -> CoreError:
    rest = match["rest"].split("[FUNC:")[0]
    dump = rest.split("dump info:", 1)[-1]
    registers = {}
    for name, values in _REGISTER.findall(dump):
        for at, value in enumerate(values.split(",")):
            registers[name if at == 0 else f"{name} {at + 1}"] = _integer(value.strip())
    text = _ERROR_TEXT.search(rest)
    code = match["code"]
    is_number = not code.startswith("0x") and code != "0"
    return CoreError(
        int(match["core"]),
        _integer(code),
        code if is_number else hex(_integer(code)),
        _optional(match["device"]),
        match["kind"].removesuffix(" exception"),
        registers,
        text["text"].strip() if text else "",
        is_number,
    )


def _extend(state: _State, match: re.Match[str]) -> None:
    """The line behind a core error: more words of the code, and what it means."""
    errors = state.pending or (state.fault.core_errors if state.fault is not None else [])
    if not errors:
        return
    error = errors[-1]
    text = _ERROR_TEXT.search(match["rest"])
    if text and not error.text:
        error.text = text["text"].strip()
    words = [_integer(word) for word in _NUMBER.findall(match["codes"])]
    if not error.is_number and len(words) > 1:
        whole = sum(word << (64 * at) for at, word in enumerate(words))
        if whole and error.code in (0, words[0]):
            error.code, error.code_text = whole, hex(whole)
    for name, value in _REGISTER.findall(match["rest"]):
        error.registers.setdefault(name, _integer(value.split(",")[0]))


def _identity(error: CoreError) -> tuple[Any, ...]:
    return error.core_id, error.code, error.pc_current


def _distinct(errors: list[CoreError]) -> list[CoreError]:
    """The errors without repetitions: the screen and the log print the same cores."""
    kept: dict[tuple[Any, ...], CoreError] = {}
    known: set[tuple[Any, ...]] = set()
    for error in sorted(errors, key=lambda e: -len(e.registers)):
        core = error.core_id, error.code
        if error.registers or core not in known:
            kept.setdefault(_identity(error), error)
            known.add(core)
    chosen = set(map(id, kept.values()))
    return [error for error in errors if id(error) in chosen]
