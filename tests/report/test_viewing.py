"""`tensorprobe view`: who is answered, what is served, and what is not."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Made, type_command
from tensorprobe.errors import BadUsage
from tensorprobe.report.serving import HOST, Viewer, find_items

Make = Callable[[str, str], Made]
Serve = Callable[..., Viewer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    viewers = []

    def start(*paths: Path) -> Viewer:
        viewer = Viewer(paths)
        threading.Thread(target=viewer.serve, daemon=True).start()
        viewers.append(viewer)
        return viewer

    yield start
    for viewer in viewers:
        viewer.close()


def ask(viewer: Viewer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, viewer.port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def path_of(viewer: Viewer) -> str:
    return viewer.address.removeprefix(f"http://{HOST}:{viewer.port}")


def test_only_who_knows_the_address_is_answered(made: Make, serve: Serve) -> None:
    viewer = serve(made("llama", "silu").folder / "out")
    home = path_of(viewer)
    assert ask(viewer, home)[0] == 200
    assert ask(viewer, "/")[0] == 403
    assert ask(viewer, "/wrong/")[0] == 403
    assert ask(viewer, home, Host="evil.example")[0] == 403
    assert ask(viewer, home, Host=f"evil.example:{viewer.port}")[0] == 403
    assert ask(viewer, home, Host=f"localhost:{viewer.port}")[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        assert ask(viewer, home, method)[0] == 501
    outside = ("../etc/passwd", "..%2f..%2fetc/passwd", "data/0/../../x", "data/9/index", "x.html")
    for each in outside:
        assert ask(viewer, home + each)[0] == 404
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((socket.gethostbyname(socket.gethostname()), viewer.port + 1), 1)


def test_recordings_outside_of_the_paths_are_not_opened(made: Make, serve: Serve) -> None:
    """A report names its recordings; they are read only if the user has given them."""
    folder = made("llama", "silu").folder
    home = Path.cwd()
    viewer = serve(folder / "out")
    at = _plain_call(viewer)
    assert json.loads(ask(viewer, f"{path_of(viewer)}data/0/pictures/{at}")[1]) is None
    assert Path.cwd() == home


@pytest.mark.parametrize("where", ["inside", "beside"])
def test_any_call_has_pictures_where_the_recordings_are_given(
    made: Make, serve: Serve, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = made("llama", "silu").folder
    monkeypatch.chdir(folder)
    paths = [Path("out"), Path("actual"), Path("expected")] if where == "beside" else [Path()]
    viewer = serve(*paths)
    number = [each.kind for each in viewer.library.items].index("compare")
    at = _plain_call(viewer, number)
    status, body = ask(viewer, f"{path_of(viewer)}data/{number}/pictures/{at}")
    assert status == 200
    assert json.loads(body)[0]["tensor"] == "output.0"


def _plain_call(viewer: Viewer, number: int = 0) -> int:
    """A call that has no pictures in the file."""
    index = json.loads(ask(viewer, f"{path_of(viewer)}data/{number}/index")[1])
    return next(i for i in range(200, index["n"]) if str(i) not in index["pictures"])


def test_a_recording_is_shown_too(made: Make, serve: Serve, opened: Callable[..., Any]) -> None:
    viewer = serve(made("llama", "silu").folder / "actual")
    page = opened(viewer.address)
    page.locator("#calls input").fill("Functional.silu.0.forward")
    page.locator("#calls .vt-spacer .vt-row").first.click()
    panel = page.locator("#call")
    panel.locator("h3", has_text="Stack").wait_for()
    assert "transformers/activations.py" in panel.inner_text()
    assert panel.locator("svg.chart").count() >= 1


def test_a_folder_lists_what_is_in_it(made: Make, serve: Serve, opened: Callable[..., Any]) -> None:
    made("llama", "silu")
    folder = made("llama", "silu").folder
    shutil.copytree(folder / "out", folder / "again", dirs_exist_ok=True)
    page = opened(serve(folder).address)
    page.get_by_role("link", name="out").click()
    page.locator("#answer", has_text="Diverged").wait_for()


def test_damaged_reports_are_said(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "report.data").write_text("{\n[[")
    for verdict, told in (
        ("[]", b"is no verdict"),
        ('{"actual": "a"}', b"expected"),
        ('{"actual": "a", "expected": "e"}', b"is no data of a report"),
    ):
        (tmp_path / "verdict.json").write_text(verdict)
        viewer = serve(tmp_path)
        status, body = ask(viewer, f"{path_of(viewer)}data/0/index")
        assert status == 500
        assert told in body


def test_nothing_to_view(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="there is no such path"):
        find_items([tmp_path / "missing"])
    with pytest.raises(BadUsage, match="expected the OUT of compare"):
        find_items([tmp_path])
    done = type_command(tmp_path, "view", "missing")
    assert done.returncode == 2
    assert done.stderr == "tensorprobe view: nothing to view at 'missing': there is no such path\n"


def test_a_port_in_use_is_one_line(made: Make) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = type_command(made("llama", "silu").folder, "view", "out", "--port", port)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tensorprobe view: cannot listen on port {port} of 127.0.0.1: ")
    assert len(done.stderr.splitlines()) == 1


def test_it_prints_its_address_and_ends_with_control_c(made: Make) -> None:
    import signal

    process = subprocess.Popen(
        [sys.executable, "-m", "tensorprobe", "view", "out", "--no-browser"],
        cwd=made("llama", "silu").folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:")
    assert line.endswith(" (open it; Ctrl+C ends it)\n")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
