"""Which versions of torch have the names that src touches: make torch-names writes the list.

The names are looked up in the .py and .pyi files of the wheels, of which only those bytes are
fetched that are needed: nothing is installed. What is in C alone and in no .pyi has a `?`; such
names are looked up by test_torch_names.py in the torch that is installed.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urljoin

SRC = Path(__file__).parents[2] / "src" / "tensorprobe"
LIST = Path(__file__).with_name("torch_names.txt")
# Every minor version, as its last release: a name does not come or go in between.
VERSIONS = (
    *("2.1.2", "2.2.2", "2.3.1", "2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0"),
    *("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
)
_INDEX = "https://pypi.org/simple/torch/"
_UNKNOWN = "?"


# ---- the names that we touch ---------------------------------------------------------------------


def touched(path: Path) -> set[str]:
    """The dotted names of torch in one file, as far as the file alone can tell."""
    tree = ast.parse(path.read_text())
    known: dict[str, str] = {}  # what a name of the file stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    names = {name for name in known.values() if "." in name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            if chain and chain[0] in known:
                names.add(".".join([known[chain[0]], *chain[1:]]))
    return _longest(names)


def touched_by_file() -> dict[str, set[str]]:
    """The names of torch in each file of src, by its path there."""
    found = {str(path.relative_to(SRC)): touched(path) for path in sorted(SRC.rglob("*.py"))}
    return {file: names for file, names in found.items() if names}


def _chain(node: ast.expr) -> list[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def _longest(names: set[str]) -> set[str]:
    """Without those that another one begins with."""
    return {n for n in names if not any(other.startswith(n + ".") for other in names)}


# ---- what a wheel has ----------------------------------------------------------------------------


class _Remote(io.RawIOBase):
    """A file on a server, of which only what is read is fetched."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with self._get("bytes=0-0") as answer:
            self._size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def _get(self, span: str):  # type: ignore[no-untyped-def]
        return urllib.request.urlopen(
            urllib.request.Request(self._url, headers={"Range": span}), timeout=120
        )

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        with self._get(f"bytes={self._at}-{self._at + wanted - 1}") as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class Wheel:
    """The modules of one wheel, and the names in them."""

    def __init__(self, url: str) -> None:
        self._zip = zipfile.ZipFile(io.BufferedReader(_Remote(url), 1 << 18))
        self._files = {name for name in self._zip.namelist() if name.endswith((".py", ".pyi"))}
        self._names: dict[str, dict[str, ast.AST | None]] = {}
        self._asked: dict[str, bool | None] = {}

    def has(self, name: str) -> bool | None:
        """Whether there is such a name; None if only C knows."""
        if name in self._asked:
            return self._asked[name]
        self._asked[name] = None  # while it is asked: modules import each other in circles
        parts = name.split(".")
        found: bool | None = False
        for cut in range(len(parts), 0, -1):
            module = ".".join(parts[:cut])
            if self._paths(module):
                found = self._inside(module, parts[cut:])
                break
        self._asked[name] = found
        return found

    def _inside(self, module: str, rest: list[str]) -> bool | None:
        if not rest:
            return True
        names = self.names(module)
        if rest[0] in ("__file__", "__name__"):
            return True
        if rest[0] not in names:
            lazy = "__getattr__" in names and module != "torch"  # torch has it for old names
            return None if lazy or module.startswith("torch._C") else False
        if len(rest) == 1:
            return True
        node = names[rest[0]]
        if isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if (a.asname or a.name) == rest[0])
            return self.has(".".join([self._absolute(module, node), alias.name, *rest[1:]]))
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == rest[0])
            return self.has(".".join([alias.name if alias.asname else rest[0], *rest[1:]]))
        if isinstance(node, ast.ClassDef):
            return self._in_class(module, node, rest[1])
        return None  # an object: what it has shows when it is there

    def _in_class(self, module: str, node: ast.ClassDef, name: str) -> bool | None:
        if name in _bound(node.body):
            return True
        answers = [self.has(f"{module}.{ast.unparse(b)}.{name}") for b in node.bases]
        answers += [self.has(f"{ast.unparse(b)}.{name}") for b in node.bases]
        return True if any(answers) else None

    def names(self, module: str) -> dict[str, ast.AST | None]:
        """What a module binds at its top, by the statement that does; None: it is a module."""
        if module in self._names:
            return self._names[module]
        found = self._names[module] = {}
        for path in self._paths(module):
            body = ast.parse(self._zip.read(path)).body
            bound = _bound(body)
            for node in _statements(body):
                if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
                    found.update(self.names(self._absolute(module, node, path)))
            found.update(bound)
        prefix = module.replace(".", "/") + "/"
        for file in self._files:
            if file.startswith(prefix):
                child = re.split(r"[/.]", file[len(prefix) :])[0]
                found.setdefault(child, None)
        if module == "torch":  # it puts them all among its own
            found.update(self.names("torch._C._VariableFunctions"))
            found.update({**self.names("torch._C"), **found})
        return found

    def _paths(self, module: str) -> list[str]:
        stem = module.replace(".", "/")
        ways = (f"{stem}.py", f"{stem}/__init__.py", f"{stem}.pyi", f"{stem}/__init__.pyi")
        return [path for path in ways if path in self._files]

    def _absolute(self, module: str, node: ast.ImportFrom, path: str = "") -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        is_package = any("__init__" in p for p in self._paths(module))
        base = package[: len(package) - node.level + is_package]
        return ".".join([*base, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(node, field, [])
            if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.ExceptHandler)):
                yield from _statements(inner)


def _bound(body: list[ast.stmt]) -> dict[str, ast.AST | None]:
    found: dict[str, ast.AST | None] = {}
    for node in _statements(body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.For)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        found[part.id] = node
    return found


@cache
def links() -> dict[str, str]:
    with urllib.request.urlopen(_INDEX, timeout=120) as answer:
        page, base = answer.read().decode(), answer.url
    urls = (urljoin(base, link).partition("#")[0] for link in re.findall(r'href="([^"]+)"', page))
    return {url.rpartition("/")[2]: url for url in urls}


def wheel(version: str) -> Wheel | None:
    """A wheel of this version for Linux; None if the index has none."""
    pattern = rf"torch-{re.escape(version)}-cp3(10|11|12)-.*linux.*x86_64\.whl"
    found = sorted(name for name in links() if re.fullmatch(pattern, name))
    return Wheel(links()[found[0]]) if found else None


# ---- the list ------------------------------------------------------------------------------------


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def read_list() -> dict[str, list[str]]:
    """The versions that have a name; [`?`] where the wheels' sources do not tell."""
    lines = LIST.read_text().splitlines()
    return {
        name: versions.split()
        for line in lines
        if line and not line.startswith("#")
        for name, _, versions in [line.partition(":")]
    }


def main() -> str | None:
    names = sorted(set().union(*touched_by_file().values()))
    had: dict[str, list[str]] = {name: [] for name in names}
    unknown: dict[str, list[str]] = {name: [] for name in names}
    seen = []
    for version in VERSIONS:
        found = wheel(version)
        if found is None:
            sys.stderr.write(f"torch {version}: the index has no wheel\n")
            continue
        seen.append(minor(version))
        for name in names:
            answer = found.has(name)
            if answer or answer is None:
                (had if answer else unknown)[name].append(minor(version))
        sys.stderr.write(f"torch {version}: read\n")
    lines = [f"# Written by: make torch-names. The versions that were read: {' '.join(seen)}"]
    for name in names:
        # C shows in a .pyi of some version, maybe: what is told of any is not unknown of another
        if unknown[name] and not had[name]:
            lines.append(f"{name}: {_UNKNOWN}")
        else:
            there = [v for v in seen if v in had[name] or v in unknown[name]]
            lines.append(f"{name}: {'all' if there == seen else ' '.join(there)}")
    LIST.write_text("\n".join(lines) + "\n")
    return None


if __name__ == "__main__":
    sys.exit(main())
