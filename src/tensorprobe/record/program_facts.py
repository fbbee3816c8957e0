"""What a running program is: its sources, hyperparameters, random states, and what is installed.

Reads only. What cannot be read is left out: the program that is asked about goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from tensorprobe.record.facts import MASK, hides_all, mask_items, mask_value
from tensorprobe.trouble import OnTrouble

_CONFIG_NAME = re.compile(
    r"(^|_)(args?|argument|cfg|conf|config|hparams?|hyper\w*|opt|options|flags)s?$"
)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MEGATRON = ("megatron.training.global_vars", "megatron.global_vars")
_MAX_FILES = 2000
_MAX_SOURCE_NBYTES = 4 << 20
_MAX_VALUES = 2000  # of hyperparameters
_MAX_DEPTH = 12
_MAX_TEXT = 500
_MOST_MASKED = 100_000  # characters of a text that are read
_MAX_FRAMES = 200


def program_facts(frame: FrameType | None = None) -> dict[str, Any]:
    """The facts of the program that calls this, or of the one that `frame` belongs to."""
    frame = frame or sys._getframe(1)
    facts: dict[str, Any] = {}
    for name, question in (
        ("program", sources),
        ("installed", installed),
        ("random", random_states),
        ("hyperparameters", lambda: found_hyperparameters(frame)),
    ):
        with OnTrouble(lambda error: None):
            facts[name] = question()
    return facts


def sources() -> dict[str, Any]:
    """The program's own files, as digests: its script, and modules that lie beside it."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    found: dict[str, Any] = {}
    if not script:
        return found
    path = Path(script).resolve()
    found["script"] = path.name
    found["sha256"] = _digest(path)
    home = str(path.parent) + os.sep
    modules = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or not file.startswith(home):
            continue
        inside = os.sep + file[len(home) :]
        installed_there = any(
            word in inside for word in (f"{os.sep}site-packages{os.sep}", ".venv")
        )
        if name != "__main__" and not installed_there and not file.startswith(_OURS):
            with OnTrouble(lambda error: None):  # a file that is gone
                modules[name] = _digest(Path(file))
        if len(modules) >= _MAX_FILES:
            break
    found["modules"] = modules
    return found


def _digest(path: Path) -> str:
    if path.stat().st_size > _MAX_SOURCE_NBYTES:
        return f"larger than {_MAX_SOURCE_NBYTES} bytes"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def installed() -> dict[str, str]:
    """Versions of all installed packages, by the names of their folders: quicker than to ask."""
    found: dict[str, str] = {}
    for folder in sys.path:
        with OnTrouble(lambda error: None):
            for entry in os.scandir(folder or "."):
                if entry.name.endswith((".dist-info", ".egg-info")):
                    name, dash, version = entry.name.rpartition(".")[0].partition("-")
                    if dash:
                        found.setdefault(plain_name(name), version.partition("-py")[0])
    return dict(sorted(found.items()))


def plain_name(package: str) -> str:
    """The name of a package as all of its spellings are compared."""
    return re.sub(r"[-_.]+", "-", package).lower()


def random_states() -> dict[str, str]:
    """Digests of the random states; nothing is drawn and no device is initialised."""
    found = {}
    random = sys.modules.get("random")
    if random is not None:
        found["python"] = _short(repr(random.getstate()).encode())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, keys, *rest = numpy.get_state()
        found["numpy"] = _short(keys.tobytes() + repr((kind, rest)).encode())
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = _short(torch.get_rng_state().numpy().tobytes())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states = torch.cuda.get_rng_state_all()
            found["cuda"] = _short(b"".join(state.numpy().tobytes() for state in states))
    return found


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# Hyperparameters


def found_hyperparameters(frame: FrameType | None) -> dict[str, Any]:
    """Arguments and configurations that the program holds in variables, by the variable's name:
    argparse, dataclasses (TrainingArguments), Megatron's, OmegaConf's (Hydra), and dicts."""
    found: dict[str, Any] = {}
    budget = [_MAX_VALUES]
    for module in _MEGATRON:
        held = getattr(sys.modules.get(module), "_GLOBAL_ARGS", None)
        if isinstance(held, argparse.Namespace):
            found["megatron"] = plain(held, budget)
    seen: set[int] = set()
    for name, value in _variables(frame):
        if id(value) not in seen and is_configuration(name, value):
            seen.add(id(value))
            if name not in found:
                found[name] = plain(value, budget)
    return found


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of the program's own functions, from the innermost out, and of its script."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if not file.startswith(_OURS) and "site-packages" not in file and "<" not in file[:1]:
            yield from _locals_of(frame)
        frame = frame.f_back
    main = sys.modules.get("__main__")
    if main is not None and not str(getattr(main, "__file__", "")).startswith(_OURS):
        yield from [*vars(main).items()]


def _locals_of(frame: FrameType) -> list[tuple[str, Any]]:
    """Before Python 3.13 a frame keeps the dict that it gives, and so keeps alive what the program
    deletes later: empty it, unless the program has that dict too, by `locals()`."""
    local = frame.f_locals
    items = [*local.items()]
    is_copy = isinstance(local, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(local) == 3:  # the frame's, `local`, and the argument
        local.clear()
    return items


def is_configuration(name: str, value: Any) -> bool:
    """Whether a variable holds arguments of the program."""
    kind = type(value)
    if isinstance(value, argparse.Namespace) or kind.__name__ in (
        "DictConfig",
        "TrainingArguments",
    ):
        return True
    if name.startswith("_") or _CONFIG_NAME.search(name.lower()) is None:
        return False
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    is_plain_dict = kind is dict and all(isinstance(key, str) for key in value)
    return is_data or (is_plain_dict and 0 < len(value) < _MAX_VALUES)


def plain(value: Any, budget: list[int], name: str = "", depth: int = 0) -> Any:
    """A configuration as JSON values, its secrets masked. Nothing of the program is called."""
    budget[0] -= 1
    if budget[0] < 0:
        return "..."
    if isinstance(value, str):
        return _short_text(mask_value(name, value[:_MOST_MASKED]), len(value))
    if value is None or isinstance(value, (bool, int, float)):
        is_secret = value is not None and mask_value(name, "x") == MASK
        return MASK if is_secret else _json_number(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    fields = _fields(value)
    if depth < _MAX_DEPTH and fields is not None:
        return {
            str(key)[:_MAX_TEXT]: plain(
                each, budget, name if hides_all(name) else str(key), depth + 1
            )
            for key, each in [*fields.items()]
        }
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return [plain(each, budget, name, depth + 1) for each in mask_items([*items])]
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _short_text(text: str, length: int) -> str:
    """The beginning of a long text, and a digest, so that another end is another text."""
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... ({length} characters, sha256 {_short(text.encode())})"


def _json_number(value: Any) -> Any:
    is_odd = isinstance(value, float) and (value != value or value in (float("inf"), -float("inf")))
    return str(value) if is_odd or (type(value) is int and abs(value) >= 1 << 63) else value


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """The fields of a namespace, a dataclass, a mapping of OmegaConf; None for what has none."""
    if type(value) is dict:
        return value
    if isinstance(value, argparse.Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = getattr(value, "__dict__", {})
        return {
            field.name: held[field.name]
            for field in dataclasses.fields(value)
            if field.name in held
        }
    omegaconf = sys.modules.get("omegaconf")
    if type(value).__name__ in ("DictConfig", "ListConfig") and omegaconf is not None:
        held = omegaconf.OmegaConf.to_container(value, resolve=False)
        return held if isinstance(held, dict) else dict(enumerate(held))
    return None
