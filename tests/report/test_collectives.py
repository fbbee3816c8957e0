"""Collectives as links between ranks: which calls are one, and how the page shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorprobe as tp
from tensorprobe.records import Call, Capture, Special, TensorRecord, TensorSummary
from tensorprobe.report.console import render
from tensorprobe.report.page_data import comparison_data, thinned, unpacked

N_RANKS, N_STEPS, WRONG = 3, 2, 1


def call(rank: int, step: int, name: str, given: float, made: float, *args: Any) -> Call:
    name = f"{name}.forward"
    read, wrote = (
        TensorRecord(
            f"{name}.{role}.0", role, "float32", (4,),
            summary=TensorSummary(-n, n, n / 3, 2 * n, 0, 0, 0),
        )
        for role, n in (("input", given), ("output", made))
    )  # fmt: skip
    return Call(
        index=0, name=name, op=f"torch.{name.split('.')[1]}", module="layer", step=step, rank=rank,
        args=(read, *args), outputs=wrote, tensors=(read, wrote),
    )  # fmt: skip


def calls(error: float) -> Iterator[Call]:
    """A product, a sum over all ranks and what is made of it; one over two of them besides."""
    pair = Special("process_group", "ranks [0, 1]")
    for rank in range(N_RANKS):
        for step in range(N_STEPS):
            mine = 1 + rank / 7 + step / 11
            own = mine * 3 * (1 + error * (rank == WRONG))
            total = (40 + step) * (1 + error)
            yield call(rank, step, "Functional.linear.0", mine, own)
            yield call(rank, step, "Distributed.all_reduce.0", own, total)
            yield call(rank, step, "Torch.sin.0", total, total / 9)
            if rank < 2:
                yield call(rank, step, "Distributed.all_reduce.1", total / 9, total, pair)
            yield call(rank, step, "Distributed.all_reduce.2", total, total * 2)


def sides() -> list[Capture]:
    found = (("actual", 0.01), ("expected", 0.0))
    return [Capture(Path(name), "native", list(calls(error))) for name, error in found]


@pytest.fixture(scope="module")
def comparison() -> tp.Comparison:
    return tp.compare(*sides())


def linked(index: dict[str, Any]) -> dict[tuple[str, str, int, int], list[tuple[int, str]]]:
    """Of each communication, the ranks and names of its calls."""
    strings, names = index["strings"], unpacked("i", index["calls"]["name"])
    ranks = unpacked("i", index["calls"]["rank"])
    found: dict[tuple[str, str, int, int], list[tuple[int, str]]] = {}
    links = (unpacked("i", index["links"][key]) for key in ("call", "link"))
    for at, link in zip(*links, strict=True):
        key = tuple(index["links"]["names"][link])
        found.setdefault(key, []).append((ranks[at], strings[names[at]]))  # type: ignore[arg-type]
    return found


def test_the_nth_of_a_group_is_one_communication(comparison: tp.Comparison) -> None:
    found = linked(comparison_data(comparison).index)
    assert len(found) == 3 * N_STEPS
    for step in range(N_STEPS):
        for number, name in enumerate(("all_reduce.0", "all_reduce.2")):
            members = found["all_reduce", "", number, step]
            assert members == [(r, f"Distributed.{name}.forward") for r in range(N_RANKS)]
        assert [rank for rank, _ in found["all_reduce", "0, 1", 0, step]] == [0, 1]


def test_a_thinned_page_keeps_the_links_of_what_it_has(comparison: tp.Comparison) -> None:
    index = comparison_data(comparison).index
    fewer = linked(thinned(index, 8))
    whole = linked(index)
    assert fewer
    assert all(set(members) <= set(whole[key]) for key, members in fewer.items())


def test_one_rank_has_no_links() -> None:
    mine = [[each for each in capture.calls if each.rank == 0] for capture in sides()]
    comparison = tp.compare(*(Capture(Path(str(n)), "native", c) for n, c in enumerate(mine)))
    assert linked(comparison_data(comparison).index) == {}


def test_the_terminal_calls_no_rank_a_match_that_was_given_a_difference(
    comparison: tp.Comparison,
) -> None:
    table = render(comparison).partition("rank  step  verdict")[2].splitlines()[1:]
    rows = {(int(row.split()[0]), int(row.split()[1])): row for row in table if row}
    for rank in range(N_RANKS):
        assert ("diverged" if rank == WRONG else "no own cause") in rows[rank, 0]
    assert not any("match" in row for row in rows.values())


def test_the_page_joins_the_ranks(tmp_path: Path, opened: Callable[..., Any]) -> None:
    comparison = tp.compare(*sides())
    assert {c.rank for c in comparison.verdict.culprits} == {WRONG}
    comparison.save(tmp_path)
    page = opened((tmp_path / "report.html").as_uri())
    matrix = page.locator("#ranks .matrix tbody tr")
    assert "\u25b2" in matrix.nth(WRONG).inner_text()
    for rank in {*range(N_RANKS)} - {WRONG}:
        cell = matrix.nth(rank).locator("td").first
        assert "\u2198" in cell.inner_text()
        came = f"came from rank {WRONG} through all_reduce #0 of all ranks"
        assert came in cell.get_attribute("title")
        later = matrix.nth(rank).locator("td").nth(1)  # no cause of its own, but not healthy
        assert later.inner_text().strip() in ("\u2198", "\u00b7")

    lanes = page.locator("#collectives svg")
    lanes.wait_for()
    assert lanes.locator(".joined").count() == 3
    assert lanes.locator(".origin").count() == 1
    assert "linear.0" in lanes.locator(".origin").get_attribute("aria-label")
    stops = [each.get_attribute("aria-label") for each in lanes.locator(".stop").all()]
    assert sum("all_reduce #0, all ranks, rank" in each for each in stops) == N_RANKS
    assert sum("all_reduce #0, 0, 1, rank" in each for each in stops) == 2
    page.locator("#collectives select").select_option("1")
    assert lanes.locator(".origin").count() == 0

    lanes.locator(".stop").first.press("Enter")
    panel = page.locator("#call")
    panel.wait_for(state="visible")
    assert "all_reduce.0" in panel.locator("h2").inner_text()
    others = panel.locator("h3", has_text="The same on the other ranks").locator("..")
    assert f"rank {WRONG}" in others.inner_text()
    others.get_by_role("button").first.click()
    assert f"step 1, rank {WRONG}" in panel.inner_text()
