"""The example of docs/monitor.md does what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

from tiny_trainings import run

from tensorprobe.monitoring.alarm_rules import RULES
from tensorprobe.monitoring.monitor_options import EVERY
from tensorprobe.monitoring.rule_names import REPLICAS, RULE_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "monitor.md").read_text()


def test_the_example(tmp_path: Path) -> None:
    script = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    console = re.search(r"```console\n(.*?)```", PAGE, re.DOTALL)
    assert script is not None
    assert console is not None
    parts = re.split(r"^\$ tensorprobe (.*)\n", console[1], flags=re.MULTILINE)[1:]
    for command, shown in zip(parts[::2], parts[1::2], strict=True):
        done = run(tmp_path, *command.split(), script=script[1])
        printed = done.stderr + done.stdout
        if command.startswith("run"):
            assert printed == shown
        else:  # the last digits of curves are a machine's own
            first, *lines = printed.splitlines()
            assert first == shown.splitlines()[0]
            alarms = [line for line in lines if line.startswith("  alarm")]
            assert len(alarms) == 2
            assert all(line in shown for line in alarms)
            assert lines[2].split()[0] == "loss"


def test_the_tables_are_those_of_the_program() -> None:
    assert list(RULE_NAMES) == [*RULES, REPLICAS]
    for name in RULE_NAMES:
        assert f"| `{name}` |" in PAGE
    for name, every in EVERY.items():
        kind = name.removesuffix("s") if name != "moments" else "moment.NAME"
        assert re.search(rf"\| `{kind}` \|.*\| {every} \|", PAGE), name
