"""An audit hook that writes down what a reader of captures must never do.

It is installed once in a process and stays silent until `arm` is called; it never raises, so that
an attack runs to its end and leaves its marker too. No torch: a plain Python starts with it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

CANARY = "tpmarker"  # every attack has it in its text, and nothing else does

# Code made from text, by callers that make it from names they have checked themselves.
_MAY_MAKE_CODE = (
    "/dataclasses.py",  # __init__ and so on of a dataclass, whose fields are in our own source
    "/collections/__init__.py",  # __new__ of a namedtuple, the same
    "/enum.py",
    "/typing.py",
    "/torch/_jit_internal.py",
    "/torch/overrides.py",
)
# torch._dynamo, imported by torch's formula for an op whose kernel does not run, runs a text of
# torch's own. Only where this function has made it: it takes no arguments, so its text is fixed.
_TEMPLATE = "<_remote_module_non_scriptable>.py"
_TEMPLATE_HOME = "/torch/distributed/nn/jit/instantiator.py"
_TEMPLATE_MAKER = "instantiate_non_scriptable_remote_module_template"
_MAY_BE_STARTED = (
    ["uname", "-p"],  # platform.processor, for the facts about a machine
)
# Modules that nobody needs to read a capture and run a call of it.
_NEVER_IMPORTED = (
    "antigravity",
    "this",
    "torch.hub",
    "torch.package",
    "torch.utils.cpp_extension",
    "torch.distributed.rpc",
    "torch.multiprocessing.spawn",
    "webbrowser",
    "urllib.request",
    "http.client",
)
_PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn")
_PATHS_WRITTEN = {  # event: which of its arguments are paths that are changed
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.mkdir": (0,),
    "os.rmdir": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
    "os.setxattr": (0,),
    "shutil.rmtree": (0,),
    "shutil.move": (0, 1),
    "shutil.copyfile": (1,),
    "tempfile.mkstemp": (0,),
    "tempfile.mkdtemp": (0,),
    "sqlite3.connect": (0,),
}
_NETWORK = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname")
_NETWORK += ("urllib.Request", "http.client.connect", "ftplib.connect", "webbrowser.open")
_TALK = ("builtins.input", "builtins.breakpoint")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What a class may be called that a process of ours sends to another over its own socket.
_MAY_BE_SENT = ("tensorprobe.", "pathlib", "copyreg", "collections", "msgspec.")
_MAY_BE_SENT += ("torch.torch_version",)  # the version, among the facts about a process
_SENT_BUILTINS = ("slice", "Ellipsis", "complex", "getattr", "set", "frozenset", "object")


class _State:
    log = -1  # a file descriptor, or -1 while nothing is watched
    outputs: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    paused = False


def arm(log: int, outputs: list[str], secrets: list[str]) -> None:
    """From now on write to `log` what is done outside of `outputs`, or reads one of `secrets`."""
    _State.outputs = tuple(os.path.realpath(path) for path in outputs)
    _State.secrets = tuple(os.path.realpath(path) for path in secrets)
    _State.log = log


def log_descriptor() -> int:
    """Where it writes; to be kept open in a child."""
    return _State.log


@contextmanager
def paused() -> Iterator[None]:
    """Inside, what is done is the bench's own work."""
    _State.paused = True
    yield
    _State.paused = False


def tell(event: str, **about: Any) -> None:
    """One line of the log."""
    line = json.dumps({"event": event, **about}, default=repr) + "\n"
    os.write(_State.log, line.encode("utf-8", "backslashreplace"))


def is_ours(command: object) -> bool:
    """Whether a child is one that a verb may start, and what it may run.

    `check` and `compare` start workers by `-c` or `-m` with code of their own; `repro` tries out
    the script it wrote, which lies in its output.
    """
    words = command if isinstance(command, list | tuple) else [command]
    words = [os.fsdecode(word) if isinstance(word, bytes | os.PathLike) else word for word in words]
    if not words or words[0] != sys.executable or not all(isinstance(w, str) for w in words):
        return False
    rest = [word for word in words[1:] if word not in ("-O", "-I", "-P", "-s", "-E", "-B", "-u")]
    if not rest or CANARY in "".join(rest[1:] if _is_script(rest[0]) else rest):
        return False
    if rest[0] == "-c":
        return rest[1].startswith("import sys; sys.path[:] = [") and "tensorprobe." in rest[1]
    return (rest[0] == "-m" and rest[1].startswith("tensorprobe")) or _is_script(rest[0])


def _is_script(path: str) -> bool:
    return os.path.basename(path) == "repro.py" and _is_output(path)


def install() -> None:
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _State.log < 0 or _State.paused:
        return
    try:
        reason = _wrong(event, arguments)
        if reason is not None:
            tell(event, why=reason[:300])
    except Exception as error:  # noqa: BLE001 a hook that raises would change what it watches
        tell("trap failed", why=f"{event}: {error!r}")


def _wrong(event: str, arguments: tuple[Any, ...]) -> str | None:
    """What is wrong with an event; None where it is fine."""
    if event == "open":
        return _opened(*arguments[:3])
    if event == "import":
        name = str(arguments[0])
        wrong = CANARY in name or name.startswith(_NEVER_IMPORTED)
        if not wrong:
            tell("imported", name=name)
        return name if wrong else None
    if event == "exec":
        return _run(arguments[0])
    if event == "compile":
        return _compiled(*arguments[:2])
    if event == "subprocess.Popen":
        known = is_ours(arguments[1]) or arguments[1] in _MAY_BE_STARTED
        return None if known else str(arguments[1])
    if event in _PROCESSES or event in _NETWORK or event in _TALK:
        if event == "socket.bind" or event == "socket.connect":
            return None if arguments[0].family == socket.AF_UNIX else repr(arguments[1])
        return repr(arguments)
    if event == "pickle.find_class":
        return _found_class(*arguments[:2])
    if event == "ctypes.dlopen":
        return _library(arguments[0])
    if event in _PATHS_WRITTEN:
        paths = [arguments[i] for i in _PATHS_WRITTEN[event] if i < len(arguments)]
        return next((str(path) for path in paths if not _is_output(path)), None)
    return None


def _opened(path: object, mode: object, flags: object) -> str | None:
    if not isinstance(path, str | bytes | os.PathLike):
        return None  # a descriptor
    text = os.fsdecode(path)
    if os.path.realpath(text) in _State.secrets:
        return f"{text} was opened"
    writes = isinstance(flags, int) and flags & _WRITE_FLAGS
    writes = writes or (isinstance(mode, str) and set(mode) & set("wax+"))
    return f"{text} was written" if writes and not _is_output(text) else None


def _is_output(path: object) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return True  # a descriptor: its opening was seen
    text = os.fsdecode(path)
    if os.sep not in text:
        return True  # beside an open folder, as our writer does; else the sandbox sees the file
    real = os.path.realpath(text)
    if real in ("/dev/null", "/dev/tty"):
        return True
    return any(real == folder or real.startswith(folder + os.sep) for folder in _State.outputs)


def _caller() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _run(code: object) -> str | None:
    if not isinstance(code, CodeType) or _is_script(code.co_filename):
        return None
    if _mentions(code):
        return f"code out of the capture, as {code.co_filename}"
    caller = _caller()
    home = caller.f_code.co_filename if caller is not None else ""
    is_text = code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen")
    if is_text and not home.endswith(_MAY_MAKE_CODE) and not _is_template(code, caller):
        return f"code of {code.co_filename}, run by {home}"
    return None


def _is_template(code: CodeType, caller: FrameType | None) -> bool:
    """Whether torch runs its template, called by nobody but its maker."""
    called_by = []
    while caller is not None and caller.f_code.co_filename.endswith(_TEMPLATE_HOME):
        called_by.append(caller.f_code)
        caller = caller.f_back
    if code.co_filename != _TEMPLATE or not called_by:
        return False
    return called_by[-1].co_name == _TEMPLATE_MAKER and called_by[-1].co_argcount == 0


def _mentions(code: CodeType) -> bool:
    names = (*code.co_names, *code.co_varnames, code.co_filename)
    if any(CANARY in name for name in names):
        return True
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if _mentions(constant):
                return True
        elif isinstance(constant, str | bytes | tuple) and CANARY in str(constant):
            return True
    return False


def _compiled(source: object, filename: object) -> str | None:
    """Text out of a capture may be parsed (ast.parse says "<unknown>"), and no more."""
    if filename == "<unknown>" or (isinstance(filename, str) and _is_script(filename)):
        return None
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    if isinstance(text, str) and CANARY in text:
        return f"as {filename}: {text[:200]}"
    return None


def _found_class(module: str, name: str) -> str | None:
    if module.startswith(_MAY_BE_SENT) or (module == "builtins" and name in _SENT_BUILTINS):
        return None
    return f"{module}.{name}"


def _library(name: object) -> str | None:
    if name is None or not isinstance(name, str):
        return None
    known = name.endswith((".so", ".so.6")) and ("/site-packages/" in name or "tensorprobe" in name)
    return None if (known or "/" not in name) and CANARY not in name else name
