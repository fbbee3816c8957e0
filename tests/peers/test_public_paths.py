"""The names under which scripts import the peers are those of peers/, and nothing else is there."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "tensorprobe"
ALIASES = [SRC / "ptdbg_ascend.py", *sorted((SRC / "msprobe").rglob("*.py"))]
_FUNCTIONS = "tensorprobe.peers.msprobe.msprobe_functions"
_EXCEPTIONS = "tensorprobe.peers.msprobe.msprobe_exceptions"
PATHS = {
    "msprobe.pytorch": (
        _FUNCTIONS,
        "PrecisionDebugger compare compare_distributed module_dump module_dump_end seed_all",
    ),
    "msprobe": ("tensorprobe.msprobe", "__version__"),
    "msprobe.core.common.exceptions": (_EXCEPTIONS, "FileCheckException MsprobeException"),
    "msprobe.core.common.utils": (_EXCEPTIONS, "CompareException DumpException"),
    "msprobe.pytorch.common": (_FUNCTIONS, "seed_all"),
    "msprobe.pytorch.common.utils": (_FUNCTIONS, "seed_all"),
    "msprobe.pytorch.compare": (_FUNCTIONS, "compare compare_distributed"),
    "msprobe.pytorch.compare.acc_compare": (_FUNCTIONS, "compare"),
    "msprobe.pytorch.compare.pt_compare": (_FUNCTIONS, "compare"),
    "msprobe.pytorch.debugger": (_FUNCTIONS, "PrecisionDebugger"),
    "msprobe.pytorch.functional.module_dump": (_FUNCTIONS, "module_dump module_dump_end"),
    "msprobe.pytorch.compare.distributed_compare": (_FUNCTIONS, "compare_distributed"),
    "msprobe.pytorch.debugger.precision_debugger": (_FUNCTIONS, "PrecisionDebugger module_dump"),
    "msprobe.pytorch.dump.debugger.precision_debugger": (
        _FUNCTIONS,
        "PrecisionDebugger module_dump module_dump_end",
    ),
    "ptdbg_ascend": (
        "tensorprobe.peers.ptdbg.ptdbg_functions",
        "PrecisionDebugger acc_cmp_dump compare compare_distributed module_dump module_dump_end "
        "overflow_check parse register_hook seed_all set_backward_input set_dump_path "
        "set_dump_switch set_overflow_check_switch",
    ),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_public_path_has_the_things_themselves(path: str) -> None:
    home, names = PATHS[path]
    alias, room = importlib.import_module(f"tensorprobe.{path}"), importlib.import_module(home)
    for name in names.split():
        assert getattr(alias, name) is getattr(room, name)
        assert name in alias.__all__


@pytest.mark.parametrize("path", ALIASES, ids=lambda path: str(path.relative_to(SRC)))
def test_an_alias_is_thin(path: Path) -> None:
    """A docstring, imports and __all__; no function, no class, no state."""
    for node in ast.parse(path.read_text()).body[1:]:
        if path.name == "__main__.py":
            assert isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)
        elif isinstance(node, ast.Assign):
            assert ast.unparse(node.targets[0]) == "__all__"
        else:
            assert isinstance(node, ast.ImportFrom)


def test_the_command_line_of_msprobe_is_a_module() -> None:
    words = [sys.executable, "-m", "tensorprobe.msprobe", "graph_visualize"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "msprobe graph_visualize is not supported; use tensorprobe compare" in done.stderr
