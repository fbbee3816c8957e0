"""comparison.csv of many ranks: a piece for each, made by as many processes as there are cores."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tensorprobe.comparing.comparison import Compared
from tensorprobe.comparing.rank_pairs import RankPart, RankSource
from tensorprobe.comparing.rank_processes import RankProcesses
from tensorprobe.comparing.rank_streams import PairsOfRanks
from tensorprobe.comparing.rank_work import Engine, Here, RankFailed
from tensorprobe.comparing.verdict import Culprit
from tensorprobe.errors import UnreadableCapture
from tensorprobe.garbage import no_garbage
from tensorprobe.report.csv import csv_lines, header_line
from tensorprobe.report.native_columns import HEADER, table_of

_Known = dict[tuple[int, int, str], Culprit]


class RankTable(msgspec.Struct):
    """Writes the lines of ranks."""

    source: RankSource
    culprits: _Known

    def do(self, task: RankPart) -> bytes:
        with no_garbage():
            pairs = self.source.pairs(task).pairs
            return b"".join(csv_lines(table_of(pairs, self.culprits)))


def write_ranks(path: Path, comparison: Compared, pairs: PairsOfRanks) -> None:
    """The native columns of all ranks."""
    culprits = {(c.rank, c.step, c.name): c for c in comparison.verdict.culprits}
    engine: Engine = RankProcesses(pairs.jobs) if pairs.jobs > 1 else Here()
    try:
        with path.open("wb") as file:
            file.write(header_line(HEADER))
            for part, lines in engine.run(RankTable(pairs.source, culprits), pairs.parts()):
                if isinstance(lines, RankFailed):
                    raise UnreadableCapture(f"the table of rank {part.rank} is missing: {lines}")
                file.write(lines)
    finally:
        engine.close()
