"""`run --monitor` and `tensorprobe monitor`, as one types them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from tiny_trainings import run

import tensorprobe as tp
from tensorprobe.cli.main import main
from tensorprobe.monitoring.series_reading import SCALAR, TrendKey, read_trends


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four trainings: two that are healthy, one with a fault, one that freezes a layer."""
    folder = tmp_path_factory.mktemp("trainings")
    for name, seed, fault in (("a", 1, 0), ("b", 2, 0), ("faulty", 1, 70), ("frozen", 1, -30)):
        done = run(folder, "run", "--monitor", name, "train.py", seed, fault, 130)
        assert done.returncode == 0, done.stderr
        found = "2 alarms" if name == "frozen" else "no alarms"
        assert f"monitor: 130 steps, {found}. Next: tensorprobe monitor show {name}" in done.stderr
    return folder


def test_an_alarm_is_one_line_while_it_runs(place: Path) -> None:
    done = run(place, "run", "--monitor", "frozen", "train.py", 1, -30, 60)
    assert done.returncode == 0  # the script's own: an alarm is advice
    lines = [line for line in done.stderr.splitlines() if "alarm" in line]
    assert lines[0].startswith("tensorprobe: alarm frozen at step 40: parameter 2.")
    assert lines[0].endswith(
        "it does not change any more: requires_grad is off now since step 31 (last good step: 30)"
    )
    assert "what an earlier run wrote is in frozen/rank0/earlier/1" in done.stderr


def test_show(place: Path) -> None:
    done = run(place, "monitor", "show", "a")
    assert done.returncode == 0, done.stderr
    first, *curves = done.stdout.splitlines()
    assert first == "rank 0: steps 0 to 129, 47 trends, no alarms"
    assert [line.split()[0] for line in curves] == ["loss", "gradient", "lr.0", "lr.1"]
    done = run(place, "monitor", "show", "frozen", "2.weight", "--json")
    assert done.returncode == 3
    (rank,) = json.loads(done.stdout)["ranks"]
    assert rank["alarms"][0]["rule"] == "frozen"
    kinds = [trend["kind"] for trend in rank["trends"]]
    assert set(kinds) == {
        "gradient", "gradient.backward", "moment.exp_avg", "moment.exp_avg_sq", "update",
        "parameter",
    }  # fmt: skip


def test_two_that_draw_other_numbers_match(place: Path) -> None:
    done = run(place, "monitor", "compare", "b", "a")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("match: 23 trends over 130 steps")
    assert "not compared: weights, moments and updates" in done.stdout


def test_where_two_part(place: Path) -> None:
    done = run(place, "monitor", "compare", "faulty", "a", "-o", "trends.json")
    assert done.returncode == 3, done.stdout
    found = json.loads((place / "trends.json").read_text())
    first = found["partings"][0]
    assert first["name"] == "2.weight"
    assert 69 <= first["step"] <= 76
    # the command it gives records that step
    words = shlex.split(found["next"])
    assert words[:2] == ["tensorprobe", "run"]
    assert words[-4:] == ["train.py", "1", "70", "130"]
    again = run(place, *words[1:])
    assert again.returncode == 0, again.stderr
    assert tp.load(place / words[words.index("-o") + 1]).steps == (first["step"],)


def test_export(place: Path) -> None:
    done = run(place, "monitor", "export", "a", "--to", "csv", "-o", "tables")
    assert done.returncode == 0, done.stderr
    rows = (place / "tables" / "rank0.csv").read_text().splitlines()
    assert rows[0].startswith("step,time,kind,name,value,norm,mean,min,max,nan")
    assert any(",gradient,2.weight,," in row for row in rows)
    done = run(place, "monitor", "export", "a", "--to", "tensorboard", "-o", "events", "--json")
    (made,) = json.loads(done.stdout)["files"]
    assert [each.name.startswith("events.out") for each in (place / made).iterdir()] == [True]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["monitor", "show", "nowhere"], 2, "no such file or folder: 'nowhere'"),
        (["monitor", "show", "tables0"], 1, "holds no trends: expected the folder of a monitor"),
        (["monitor", "show", "a", "--limit", "0"], 2, "--limit 0: expected a number from 1"),
        (["monitor", "compare", "a", "b", "-o", "x.html"], 2, "expected a name for the JSON"),
        (["monitor", "export", "tables0", "--to", "csv", "-o", "x"], 2, "no folder of a monitor"),
        (["run", "--monitor", "m", "--monitor-every", "x", "train.py"], 2, "a number of steps"),
        (["run", "--monitor", "m", "--monitor-every", "grads=1", "train.py"], 2, "gradients"),
        (["run", "--monitor", "m", "--monitor-rules", "spikes", "train.py"], 2, "spike"),
        (["run", "--monitor", "m", "--monitor-to", "csv", "train.py"], 2, "tensorboard, wandb"),
        (["run", "--monitor", "m", "--monitor-disk", "1K", "train.py"], 2, "64K or more"),
        (["run", "--record-on-alarm", "--", "train.py"], 2, "without --monitor DIR"),
        (["run", "--monitor", "train.py", "train.py"], 2, "'train.py' is a file"),
    ],
)
def test_wrong_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables0").mkdir()
    (tmp_path / "train.py").write_text("")
    assert main(words) == status
    printed = capsys.readouterr()
    assert text in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


def test_a_killed_training_goes_on(tmp_path: Path) -> None:
    options = ["run", "--monitor", "m", "--resume"]
    done = run(tmp_path, *options, "train.py", 1, 0, 90, 50)
    assert done.returncode == -9
    (killed,) = read_trends(tmp_path / "m")
    # all that were over: the one it was killed in had stepped, and stayed open for more numbers
    assert killed.steps.tolist() == [*range(50)]
    assert killed.gaps == []
    done = run(tmp_path, *options, "train.py", 1, 0, 30)
    assert done.returncode == 0, done.stderr
    # The second start made the optimizer anew, and forgot what the first one knew.
    assert "alarm moments at step 50: moment.exp_avg_sq" in done.stderr
    (both,) = read_trends(tmp_path / "m")
    assert both.steps.tolist() == [*range(80)]
    assert len(both.facts["attempts"]) == 2
    assert TrendKey(SCALAR, "loss") in both.trends


def test_what_follows_an_alarm_is_recorded(tmp_path: Path) -> None:
    done = run(
        tmp_path, "run", "--monitor", "m", "--record-on-alarm", "2", "--level", "L0",
        "--keep", "tensors", "train.py", 1, -30, 60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (rank,) = read_trends(tmp_path / "m")
    (recording,) = {alarm.recording for alarm in rank.alarms} - {None}
    capture = tp.load(tmp_path / recording)
    assert capture.steps == (41, 42)
    assert {call.name for call in capture.calls} >= {"Module.2.Linear.forward.0"}
    assert any(call.op.endswith("AdamW.step") for call in capture.calls)


@pytest.mark.slow
def test_what_follows_an_alarm_is_guarded(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--monitor", "g", "--guard-on-alarm", "train.py", 1, -30, 60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "g" / "alarm-frozen-step41" / "findings.json").is_file()


def test_it_runs_beside_a_recorder_and_a_guard(tmp_path: Path) -> None:
    done = run(
        tmp_path, "run", "--monitor", "m", "--guard", "overflow", "-o", "capture", "--level", "L1",
        "--steps", "3", "train.py", 1, 0, 30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert tp.load(tmp_path / "capture").steps == (3,)
    (rank,) = read_trends(tmp_path / "m")
    assert rank.steps.tolist() == [*range(30)]
    assert rank.alarms == []
