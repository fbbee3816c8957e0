"""The public API: its names and signatures are those of api.txt, and docs/python.md has each.

Renew api.txt after a change that is meant:  python tests/test_api.py
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tensorprobe as tp
from tensorprobe import errors
from tensorprobe.cli.main import build_parser
from tensorprobe.cli.options import as_options, option_names
from tensorprobe.config import RecordConfig

HERE = Path(__file__).parent
API = HERE / "api.txt"
PAGE = HERE.parent / "docs" / "python.md"
WIDTH = 100
FOREIGN = ("builtins", "collections.abc", "msgspec", "msgspec._core")


def api() -> str:
    """One line a name; a longer signature takes a line an argument."""
    lines: list[str] = []
    for name in tp.__all__:
        thing = getattr(tp, name)
        if inspect.isclass(thing):
            lines += ["", *of_class(name, thing)]
        elif inspect.isroutine(thing):
            lines += ["", *signature(f"tensorprobe.{name}", thing)]
    return "\n".join(lines[1:]) + "\n"


def of_class(name: str, kind: type) -> Iterator[str]:
    if issubclass(kind, Exception):
        bases = ", ".join(base.__name__ for base in kind.__bases__)
        yield f"tensorprobe.{name}: {bases}"
        return
    yield from signature(f"tensorprobe.{name}", kind)
    for member in sorted(dir(kind)):
        value = inspect.getattr_static(kind, member)
        if member.startswith("_") and member != "__call__":
            continue
        if any(member in vars(base) for base in kind.__mro__ if base.__module__ in FOREIGN):
            continue
        if isinstance(value, property):
            gives = inspect.signature(value.fget).return_annotation
            yield f"    .{member}: {gives}"
        elif isinstance(value, classmethod) or inspect.isfunction(value):
            yield from signature(f"    .{member}", getattr(kind, member))


def signature(name: str, function: Any) -> Iterator[str]:
    found = inspect.signature(function)
    given = [each for each in found.parameters.values() if each.name != "self"]
    given = [each.replace(default="...") if is_odd(each.default) else each for each in given]
    if inspect.isclass(function) and issubclass(function, msgspec.Struct):
        # as they stand in the source: resolved ones look different from Python to Python
        given = [each.replace(annotation=function.__annotations__[each.name]) for each in given]
    gives = "" if inspect.isclass(function) else found.return_annotation
    whole = str(found.replace(parameters=given, return_annotation=inspect.Signature.empty))
    end = f" -> {gives}" if gives else ""
    line = f"{name}{plain(whole)}{end}"
    if len(line) <= WIDTH:
        yield line
        return
    indent = " " * (len(name) - len(name.lstrip()) + 4)
    yield f"{name}("
    keywords_begin = False
    for each in given:
        if each.kind is each.KEYWORD_ONLY and not keywords_begin:
            keywords_begin = True
            yield f"{indent}*,"
        yield f"{indent}{plain(str(each))},"
    yield f"{indent[4:]}){end}"


def is_odd(default: object) -> bool:
    """Whether a default has no text of its own: a function, say."""
    return callable(default) and default is not inspect.Parameter.empty


def plain(text: str) -> str:
    """Annotations are text, which `str` quotes in some versions of Python."""
    return re.sub(r": (['\"])(.*?)\1", r": \2", text).replace("'...'", "...")


def test_names_and_signatures_are_those_of_the_file() -> None:
    assert api() == API.read_text(), "meant? Then renew the file: python tests/test_api.py"


def test_the_page_has_every_name_and_no_other() -> None:
    listed = re.findall(r"^\| `tp\.(\w+)", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == [name for name in tp.__all__ if name != "__version__"]


def test_dir_completes_every_name_sorted() -> None:
    assert dir(tp) == sorted(tp.__all__) == list(tp.__all__)
    for name in tp.__all__:
        assert getattr(tp, name) is getattr(tp, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = tp.nothing


def test_only_names_that_need_torch_import_it() -> None:
    need = {"Guard", "Monitor", "Recorder", "Reroute", "reference", "repro", "reroute"}
    light = [name for name in tp.__all__ if name not in need]
    code = f"import sys, tensorprobe as tp\nfor name in {light}: getattr(tp, name)\n"
    code += "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_error_is_public() -> None:
    kinds = {name for name, kind in vars(errors).items() if inspect.isclass(kind)}
    assert kinds <= set(tp.__all__)


def test_functions_stay_functions_when_their_rooms_are_imported() -> None:
    code = (
        "import inspect, sys, tensorprobe as tp\n"
        "import tensorprobe.report.saving, tensorprobe.checking.run, tensorprobe.comparing.align\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'timeout' in inspect.signature(tp.compare).parameters\n"
        "assert inspect.isfunction(tp.check)\n"
        "from tensorprobe import check, compare\n"
        "assert compare is tp.compare and check is tp.check\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


TYPED = """
import tensorprobe as tp
recorder: tp.Recorder = tp.Recorder("a", level="L1", steps="0-1", apis=["relu"], queue="1G")
comparison: tp.Comparison = tp.compare("a", "b", jobs=2, timeout=3.0)
checked: tp.Checked = tp.check("a", "b", jobs=2)
comparison.save("out", xlsx=True)
tp.Recorder("a", levl="L1")
tp.Recorder("a", level="L9")
tp.compare("a", "b", jobs="two")
"""


@pytest.mark.slow
def test_a_type_checker_sees_every_option(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=cache",
               "--follow-imports=silent", "--no-error-summary", "typed.py"]  # fmt: skip
    environment = {**os.environ, "MYPYPATH": str(HERE.parent / "src")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    wrong = [line for line in done.stdout.splitlines() if " error: " in line]
    said = ("7: error: Unexpected keyword argument", "8: error: Arg", "9: error: Arg")
    assert len(wrong) == len(said), done.stdout + done.stderr
    for line, start in zip(wrong, said, strict=True):
        assert line.startswith(f"typed.py:{start}")


def test_a_recorder_takes_what_a_configuration_has() -> None:
    given = inspect.signature(tp.Recorder).parameters
    for field in msgspec.structs.fields(RecordConfig):
        assert given[field.name].default == field.default, field.name


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tp.compare("a", "b", jobs=0), "jobs=0: expected 1 or more"),
        (lambda: tp.compare("a", "b", processes=0), "jobs=0: expected 1 or more"),
        (lambda: tp.check("a", "b", timeout_s=0), "timeout=0: expected a number of seconds above"),
        (lambda: tp.Guard(alone_timeout_s=-1), "timeout=-1: expected a number of seconds from 0"),
        (lambda: tp.Guard(path="a", folder="b"), "folder= is the former name of path=: give one"),
        (lambda: tp.compare("a", "b", job=1), "unknown argument 'job'. Did you mean 'jobs'?"),
        (lambda: tp.Recorder("a", apiss=1), "unknown argument 'apiss'. Did you mean 'apis'?"),
    ],
)
def test_former_and_wrong_arguments(call: Any, words: str) -> None:
    with pytest.raises(tp.BadUsage) as caught:
        call()
    assert str(caught.value).startswith(words)
    assert "--" not in str(caught.value)


def test_a_guard_is_at_its_path_by_both_names(tmp_path: Path) -> None:
    guard = tp.Guard(folder=tmp_path / "found")
    assert guard.path == guard.folder == tmp_path / "found"


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        ("compare a b --processes 2", "jobs", 2),
        ("compare a b --replay-seconds 3", "timeout", 3.0),
        ("run --guard-out found train.py", "guard_output", "found"),
        ("run --alone-timeout 5 train.py", "timeout", 5.0),
        ("ascend convert dump --out arrays", "out", Path("arrays")),
    ],
)
def test_former_options_still_work_and_are_not_shown(words: str, dest: str, value: object) -> None:
    verb, *_ = given = words.split()
    parser = build_parser(verb)
    assert getattr(parser.parse_args(given), dest) == value
    (verbs,) = (each for each in parser._actions if each.dest == "verb")
    former = next(word for word in given if word.startswith("--"))
    assert f"{former} " not in verbs.choices[verb].format_help()


def test_the_command_line_names_options() -> None:
    (verbs,) = (each for each in build_parser("check")._actions if each.dest == "verb")
    names = option_names(verbs.choices["check"])
    for text, typed in {
        "jobs=0: expected 1 or more": "--jobs 0: expected 1 or more",
        "see `only` and `skip`": "see --only and --skip",
        "give another `path`, or `restart=True`": "give another --output, or --restart",
        "(allow its package with `imports='mylib'`)": "(allow its package with --import mylib)",
        "no `other=1` of 'jobs=2'": "no `other=1` of 'jobs=2'",
    }.items():
        assert as_options(text, names) == typed


def a_call(name: str = "Torch.relu.0.forward", step: int = 0) -> tp.Call:
    return tp.Call(index=0, name=name, op="torch.relu", module="net.act", step=step)


def a_capture(*calls: tp.Call) -> tp.Capture:
    return tp.Capture(Path("runs/a"), "native", calls)


def test_a_call_that_is_not_there_is_one_error_everywhere() -> None:
    capture = a_capture(a_call())
    said = set()
    for kind in (tp.NoSuchCall, tp.UnreadableCapture, KeyError):
        for ask in (capture.call, lambda name: tp.repro(capture, name, "out")):
            with pytest.raises(kind) as caught:
                ask("Torch.rleu.0.forward")
            said.add(str(caught.value))
    near = "near names: Torch.relu.0.forward"
    assert said == {f"no call 'Torch.rleu.0.forward' among 1 in 'runs/a'; {near}"}
    for ask in (capture.call, lambda name, step: tp.repro(capture, name, "out", step=step)):
        with pytest.raises(tp.NoSuchCall, match=r"it has steps \[0\] and ranks \[0\]"):
            ask("Torch.relu.0.forward", step=7)


def test_what_a_notebook_shows(tmp_path: Path) -> None:
    call = a_call()
    capture = a_capture(call, a_call("Torch.relu.0.forward", step=1))
    assert repr(call) == "<Call Torch.relu.0.forward in net.act: 0 tensors, step 0, rank 0>"
    assert repr(capture) == "<Capture runs/a: 2 calls in 2 steps>"
    assert repr(a_capture(call).calls) == "<1 call>"
    culprit = tp.Culprit(
        name=call.name, kind="output", direction="forward", step=0, rank=0, module="", op="",
        stack=(), reason="its output differs", own_error=1.0, inherited_error=0.0,
    )  # fmt: skip
    assert repr(culprit) == "<Culprit Torch.relu.0.forward, step 0, rank 0: its output differs>"
    verdict = tp.Verdict(
        verdict="diverged", actual="a", expected="b", mode="tensors", counts={"aligned": 1},
        culprits=[culprit],
    )  # fmt: skip
    assert repr(verdict) == "<Verdict diverged: 1 culprit, first Torch.relu.0.forward>"
    comparison = tp.Comparison(capture, capture, (), verdict)
    assert repr(comparison) == "<Comparison diverged: 1 culprit, first Torch.relu.0.forward>"
    verdict = msgspec.structs.replace(verdict, verdict="match", culprits=[])
    assert repr(verdict) == "<Verdict match: 1 call aligned>"
    counts = {"calls": 3, "checked": 2, "pass": 1, "fail": 1, "skipped": 0, "crashed": 0}
    assert repr(tp.Checked(Path("out"), [], counts)) == "<Checked out: 3 calls, 1 pass, 1 fail>"
    finding = tp.Finding(
        name=call.name, kind="nonfinite", direction="forward", step=3, rank=0, module="", op="",
        stack=(), reason="",
    )  # fmt: skip
    assert repr(finding) == "<Finding nonfinite: Torch.relu.0.forward, step 3, rank 0>"
    guard = tp.Guard(tmp_path / "guard")
    assert repr(guard) == f"<Guard {tmp_path}/guard: not watching overflow, 0 findings>"
    recorder = tp.Recorder(tmp_path / "run", log=lambda text: None)
    assert repr(recorder) == f"<Recorder {tmp_path}/run: not started, step 0>"
    recorder.start()
    recorder.step()
    assert repr(recorder) == f"<Recorder {tmp_path}/run: recording, step 1>"
    recorder.stop()
    assert repr(recorder) == f"<Recorder {tmp_path}/run: stopped, step 1>"
    recorder.close()  # with nothing recorded
    assert repr(recorder) == f"<Recorder {tmp_path}/run: failed, step 1>"


if __name__ == "__main__":
    API.write_text(api())
