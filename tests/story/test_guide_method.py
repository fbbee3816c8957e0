"""The method of the guide, by the book: each step starts from what the files of the last one say.

Dump the network on both devices and compare; narrow it down with list and range; look at the stack;
dump the ACL data of the suspect; repair it; compare again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from npu_program import TRAIN, call_of, end, on_cpu, on_npu, rows, start, write

from tensorprobe.cli.main import main
from tensorprobe.ptdbg_ascend import compare, compare_distributed, parse

DUMP = """
set_dump_path("./{device}/npu_dump.pkl", dump_tag="{tag}")
register_hook(model, acc_cmp_dump)
set_dump_switch("ON", {switch})
step()
"""
ACL = """
register_hook(model, acc_cmp_dump, dump_mode="acl", dump_config="./dump.json")
set_dump_switch("ON", mode="acl", scope=[{scope!r}], filter_switch="OFF")
step()
set_dump_switch("OFF")
"""
WHOLE = 'mode="api_stack"'


def dump(folder: Path, device: str, tag: str, switch: str) -> None:
    write(folder, tag, DUMP.format(device=device, tag=tag, switch=switch))


def run_together(folder: Path, *commands: list[str], **environ: str) -> None:
    for process in [start(folder, *words, **environ) for words in commands]:
        done = end(process)
        assert done.returncode == 0, done.stderr


def judged(folder: Path, verdict: str) -> list[str]:
    return [row["NPU Name"] for row in rows(folder) if row["Accuracy Reached or Not"] == verdict]


@pytest.mark.slow
def test_the_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    # 1. Dump the whole network. 2. Compare.
    dump(tmp_path, "npu", "npu_whole", WHOLE)
    dump(tmp_path, "cpu", "cpu_whole", WHOLE)
    run_together(tmp_path, on_npu("npu_whole"), on_cpu("cpu_whole"))
    npu, cpu = Path("npu/npu_whole_v2.3/rank0"), Path("cpu/cpu_whole_v2.3/rank0")
    sides = {"npu": npu / "api_stack_npu_dump", "bench": cpu / "api_stack_npu_dump"}
    compare(
        {f"{side}_pkl_path": f"{path}.pkl" for side, path in sides.items()}
        | {f"{side}_dump_data_dir": str(path) for side, path in sides.items()},
        "./output",
        stack_mode=True,
    )

    # 3. The first that is not accurate; the advice points to the same.
    wrong = judged(Path("output"), "No")
    suspect = call_of(wrong[0])
    (advice,) = Path("output").glob("advisor_*.txt")
    assert f"Suspect Nodes: {wrong[0]}\n" in advice.read_text()

    # 4. Its stack: the line of the script that calls it.
    capsys.readouterr()
    parse(f"{npu}/api_stack_npu_dump.pkl", suspect)
    told = capsys.readouterr().out
    lines = [int(n) for n in re.findall(r'File "\S*train_npu_whole\.py", line (\d+)', told)]
    source = TRAIN.splitlines()[lines[-1] - 1]
    assert source.strip() == "return self.fc(nn.functional.gelu(self.norm(x)))"

    # 5. Narrower dumps: it alone, and from the call before it to it; and its ACL data.
    order = [call_of(row["NPU Name"]) for row in rows(Path("output"))]
    before = order[order.index(suspect) - 1]
    dump(tmp_path, "npu", "list", f'mode="list", scope=["{suspect}"]')
    dump(tmp_path, "npu", "range", f'mode="range", scope=["{before}", "{suspect}"]')
    write(tmp_path, "acl", ACL.format(scope=suspect))
    config = {"dump_list": [], "dump_path": "./dump/output", "dump_mode": "all"}
    Path("dump.json").write_text(json.dumps({"dump": {**config, "dump_op_switch": "on"}}))
    # The repair that is at hand: this operator on the CPU, until its kernel is better.
    dump(tmp_path, "npu", "cured", WHOLE)
    api = suspect.removeprefix("Functional_").rpartition("_")[0].rpartition("_")[0]
    run_together(
        tmp_path,
        on_npu("list"),
        on_npu("range"),
        on_npu("acl"),
        on_npu("cured", "--reroute", f"F.{api}=cpu"),
        TASK_QUEUE_ENABLE="0",
    )

    # 6. Compared with what the CPU gave for the network, the suspect takes the same, gives another.
    for tag in ("list", "range"):
        compare_distributed(f"npu/{tag}_v2.3", cpu.parent, f"output_{tag}")
        forward = [name for name in judged(Path(f"output_{tag}"), "No") if "forward" in name]
        assert forward == [f"{suspect}_output"] == wrong[:1]
    assert judged(Path("output_range"), "Yes")[0].startswith(before)

    # Its kernel got what the dump of the network has as input, and gave its wrong output.
    assert main(["ascend", "convert", "dump/output", "-o", "arrays"]) == 0
    (taken,) = Path("arrays").rglob("LayerNorm.*.input.0.npy")
    (given,) = Path("arrays").rglob("LayerNorm.*.output.0.npy")
    data = npu / "api_stack_npu_dump"
    for found, recorded in ((taken, f"{suspect}_input.0.npy"), (given, f"{suspect}_output.npy")):
        np.testing.assert_allclose(np.load(found), np.load(data / recorded), rtol=1e-4, atol=1e-6)

    # 7. The whole network again: nothing is left.
    compare_distributed("npu/cured_v2.3", cpu.parent, "output_cured")
    assert judged(Path("output_cured"), "No") == []
    assert {f"{suspect}_output"} <= set(judged(Path("output_cured"), "Yes"))
