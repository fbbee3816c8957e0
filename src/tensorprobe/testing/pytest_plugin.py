"""The plugin of pytest: the fixture `tensorprobe_match`, and `--tensorprobe-update`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

_OPTION = "--tensorprobe-update"
_RENEWED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tensorprobe")
    group.addoption(
        _OPTION,
        action="store_true",
        help="store what tensorprobe_match records, in place of what it compares with",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(_OPTION) and os.environ.get("CI"):
        raise pytest.UsageError(
            f"{_OPTION} where CI is set: a build must not renew what it is judged by. "
            "Renew it on a machine of yours, look at the difference, and commit it"
        )


@pytest.fixture
def tensorprobe_match(request: pytest.FixtureRequest, tmp_path: Path) -> Matching:
    """Records a function and compares it with a capture that is stored beside the test."""
    return Matching(request, tmp_path)


class Matching:
    """What the fixture gives: call it with a function and the path of a stored capture.

    def test_llama(tensorprobe_match):
        tensorprobe_match(run, "golden/llama_tiny")
    """

    def __init__(self, request: pytest.FixtureRequest, place: Path) -> None:
        self._request = request
        self._place = place
        self._n_runs = 0

    def __call__(
        self,
        run: Callable[[], Any],
        golden: str | os.PathLike[str],
        *,
        compare: Mapping[str, Any] | None = None,
        **recording: Any,
    ) -> None:
        """Fail with the verdict unless `run()` matches what is stored at `golden`, a path from the
        folder of the test.

        `compare` has options of tp.compare, all others are those of tp.Recorder.
        """
        __tracebackhide__ = True
        from tensorprobe.testing.matching import (
            assert_match,
            check_replaceable,
            record_run,
            renew,
        )

        stored = self._request.path.parent / golden
        is_renewed = self._request.config.getoption(_OPTION)
        if is_renewed:
            check_replaceable(stored)  # before the run, which may take long
        elif not stored.exists():
            pytest.fail(
                f"nothing is stored at '{stored}'. To store what this test records: "
                f"{self._command()}",
                pytrace=False,
            )
        folder = self._place / f"recorded{self._n_runs}"
        self._n_runs += 1
        record_run(run, folder, recording)
        if is_renewed:
            renew(stored, folder)
            self._request.config.stash.setdefault(_RENEWED, []).append(str(stored))
            return
        assert_match(folder, stored, **(compare or {}))

    def _command(self) -> str:
        return f"pytest {quote(self._request.node.nodeid)} {_OPTION}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    renewed = config.stash.get(_RENEWED, None)
    if renewed:
        terminalreporter.section("tensorprobe")
        for path in renewed:
            terminalreporter.line(f"stored {path}: look at it before you commit it")
