"""Libraries that stand in for CANN, so that the real torch_npu runs on a machine without an NPU.

    python build.py TORCH TORCH_NPU OUT     (the folders of the two packages)

Memory of the device is memory of the host. An operator (aclnn...) is answered by the CPU kernel of
the libtorch that is already in the process, as a line of operators.txt says. What torch_npu may
ask for is read from its libraries: an operator that has no line, and a function of the runtime that
is not in runtime.c, fail with their name.

What no stand-in can show: how an NPU rounds, its own memory formats, streams that overlap, which
dtypes its kernels refuse.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
# What torch_npu is linked against beside libascendcl.so, which has all functions but operators.
OTHERS = (
    *("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so"),
    *("libacl_tdt_channel.so", "libatb.so"),
)
FOLDERS = ("runtime", "toolkit", "opp", "compiler")  # torch_npu looks whether they are there
# Newer than the sources we know the arguments from; torch_npu has an older way without them.
UNKNOWN = {"aclnnTopkV2"}
PARTS = 3  # files the operators are compiled in

# kind: type of the argument, and the expression that the call sees
KINDS = {
    "Tensor": ("const aclTensor*", "look({0})"),
    "Out": ("const aclTensor*", "look({0})"),
    "InOut": ("const aclTensor*", "look({0})"),
    "Tensors": ("const Tensors*", "look_all({0})"),
    "Outs": ("const Tensors*", "look_all({0})"),
    "InOuts": ("const Tensors*", "look_all({0})"),
    "Scalar": ("const aclScalar*", "number({0}).value_or(1)"),
    "MaybeScalar": ("const aclScalar*", "number({0})"),
    "Scalars": ("const List<const aclScalar*>*", "numbers({0})"),
    "Ints": ("const List<int64_t>*", "copied({0})"),
    "Floats": ("const List<float>*", "copied({0})"),
    "Bools": ("const List<char>*", "copied({0})"),
    "Type": ("int", "type_of({0})"),
    "Text": ("const char*", 'std::string({0} ? {0} : "")'),
    **{
        name: (name if name in ("bool", "double", "float") else f"{name}_t", "{0}")
        for name in ("int8", "int32", "int64", "uint64", "bool", "double", "float")
    },
}


class Operator(NamedTuple):
    name: str
    arguments: list[tuple[str, str]]  # kind, name
    call: str


def read_table(path: Path = HERE / "operators.txt") -> list[Operator]:
    """The lines of operators.txt."""
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, arguments, call = (part.strip() for part in line.split("|", 2))
        pairs = [tuple(argument.split()) for argument in arguments.split(",")]
        for kind, _ in pairs:
            if kind not in KINDS:
                raise SystemExit(
                    f"{path.name}:{number}: no kind {kind}; there are {', '.join(KINDS)}"
                )
        if name in found:
            raise SystemExit(f"{path.name}:{number}: {name} is there twice")
        found[name] = Operator(name, pairs, call)
    return list(found.values())


def write_operator(op: Operator) -> str:
    """The two functions of an operator, in C++."""
    declared = ", ".join(f"{KINDS[kind][0]} {name}_" for kind, name in op.arguments)
    early, late, reads, writes, outs = [], [], [], [], []
    for kind, name in op.arguments:
        line = f"auto {name} = {KINDS[kind][1].format(name + '_')};"
        # The caller's characters and numbers may be gone when the work is done; its tensors not.
        (late if KINDS[kind][0] in ("const aclTensor*", "const Tensors*") else early).append(line)
        if kind in ("Tensor", "InOut", "Tensors", "InOuts"):
            reads.append(f"add_to(reads, {name}_);")
        if kind in ("Out", "InOut", "Outs", "InOuts"):
            writes.append(f"add_to(writes, {name}_);")
        if kind in ("Out", "Outs"):
            outs.append(f"add_to(outs, {name}_);")
    work = f"put_results({op.call}, outs);" if outs else f"{op.call};"
    return f"""
extern "C" int aclnn{op.name}GetWorkspaceSize(
    {declared}, uint64_t* workspace, aclOpExecutor** executor) {{
  try {{
    std::vector<const aclTensor*> reads, writes, outs;
    {" ".join(reads + writes + outs)}
    {" ".join(early)}
    return plan("{op.name}", reads, writes, [=]() mutable {{
      {" ".join(late)}
      {work}
    }}, workspace, executor);
  }} catch (const std::exception& error) {{
    return fail(561000, std::string("aclnn{op.name}: ") + error.what());
  }}
}}
extern "C" int aclnn{op.name}(void*, uint64_t, aclOpExecutor* executor, void*) {{
  return run(executor);
}}
"""


def read(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr.decode(errors='replace')[-6000:]}")
    return done.stdout.decode(errors="replace")


def wanted_names(torch_npu: Path) -> tuple[set[str], set[str]]:
    """What torch_npu is linked against, and the operators that it looks up by name."""
    linked, operators = set(), set()
    pattern = r"acl|Hccl|Hcom|Msprof|ge[A-Z]|rt[A-Z]|_ZNK?2ge|_ZT[VI]N2ge|_ZNK?3acl"
    for file in (*torch_npu.glob("_C*.so"), *torch_npu.glob("lib/*.so")):
        names = [
            line.split()[-1] for line in read("nm", "-D", "--undefined-only", file).splitlines()
        ]
        linked |= {name for name in names if "@" not in name and re.match(pattern, name)}
        operators |= set(re.findall(r"^aclnn\w+$", read("strings", "-a", file), re.M))
    return linked, {name.removesuffix("GetWorkspaceSize") for name in operators}


def absent_function(number: int, name: str) -> str:
    if name.startswith(("_ZTV", "_ZTI")):
        return f'char v{number}[256] __asm__("{name}");\n'
    return (
        f'long f{number}(void) __asm__("{name}"); '
        f'long f{number}(void) {{ return cann_absent("{name}"); }}\n'
    )


def write_if_new(path: Path, text: str) -> None:
    """Leave a file as old as it is where it has this text, so that it is not compiled again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def build(torch: Path, torch_npu: Path, out: Path) -> None:
    """Make all libraries in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    table = read_table()
    linked, operators = wanted_names(torch_npu)
    missing = sorted(operators - UNKNOWN - {f"aclnn{op.name}" for op in table})

    def defined(path: Path) -> set[str]:
        return set(re.findall(r"\b((?:acl|Hccl|Msprof)\w+)\(", path.read_text()))

    source = out / "absent.c"
    here = defined(HERE / "runtime.c") | defined(HERE / "machinery.cpp") | defined(HERE / "hccl.c")
    lines = [absent_function(n, name) for n, name in enumerate(sorted(linked - here))]
    source.write_text("long cann_absent(const char* name);\n" + "".join(lines))
    c = ["gcc", "-O1", "-w", "-shared", "-fPIC"]
    runtime = [HERE / "runtime.c", HERE / "hccl.c", source, "-lpthread", "-lrt", "-lm"]
    read(*c, "-o", out / "libascendcl.so", "-Wl,-soname,libascendcl.so", *runtime)
    nothing = out / "nothing.c"
    nothing.write_text("")
    for name in OTHERS:
        also = ["-Wl,--no-as-needed", f"-L{out}", "-lascendcl"]
        read(*c, "-o", out / name, f"-Wl,-soname,{name}", nothing, *also)

    for part in range(PARTS):
        code = "".join(write_operator(op) for op in table[part::PARTS])
        write_if_new(out / f"operators{part}.cpp", f'#include "helpers.h"\n{code}')
    pairs = [
        f'extern "C" int {name}GetWorkspaceSize() {{ return absent("{name}"); }}\n'
        f'extern "C" int {name}() {{ return absent("{name}"); }}\n'
        for name in missing
    ]
    write_if_new(out / "absent_operators.cpp", "int absent(const char*);\n" + "".join(pairs))
    sources = [HERE / "machinery.cpp", HERE / "dump.cpp", out / "absent_operators.cpp"]
    sources += [out / f"operators{part}.cpp" for part in range(PARTS)]
    headers = [f"-I{HERE}", "-isystem", torch / "include"]
    headers += ["-isystem", torch / "include" / "torch" / "csrc" / "api" / "include"]

    newest = max((HERE / name).stat().st_mtime for name in ("helpers.h", "machinery.h"))

    def compile_one(path: Path) -> Path:
        made = out / f"{path.stem}.o"
        if made.exists() and made.stat().st_mtime > max(newest, path.stat().st_mtime):
            return made
        read("g++", "-std=c++17", "-O1", "-w", "-fPIC", *headers, "-c", path, "-o", made)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    libraries = [f"-L{out}", "-lascendcl", f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    name = "libopapi.so"
    read("g++", "-shared", "-o", out / name, f"-Wl,-soname,{name}", *objects, *libraries)
    for folder in FOLDERS:
        (out / folder).mkdir(exist_ok=True)
    print(f"{len(table)} operators, {len(missing)} that fail with their name, in {out}")


if __name__ == "__main__":
    if len(sys.argv) != 4 or shutil.which("g++") is None:
        raise SystemExit(__doc__ if len(sys.argv) != 4 else "g++ is needed (apt-get install g++)")
    build(*map(Path, sys.argv[1:]))
