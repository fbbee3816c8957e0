"""The library of tally.c: the same as numpy, bit for bit but for the last ones of mean and norm."""

import ctypes
import math
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.records import TensorSummary
from tensorprobe.tensors import build_tally as build
from tensorprobe.tensors import host, tally
from tensorprobe.tensors.digest import Digester, digest_bytes
from tensorprobe.tensors.summarizer import Summarizer
from tensors import cases
from tensors.test_digest import by_definition

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
DTYPES = [dtype for dtype in cases.DTYPES if cases.title(dtype) in tally.KINDS]
CHUNK_NBYTES = 65536


def is_fresh(target: Path) -> bool:
    return target.exists() and target.stat().st_mtime > build.SOURCE.stat().st_mtime


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tally.TallyLibrary:
    """As `make setup` leaves it, else built here."""
    target = build.TARGET
    if not is_fresh(target):
        target = tmp_path_factory.mktemp("library") / "libtally.so"
        failure = build.build(target)
        if failure is not None:
            pytest.skip(f"no library: {failure}")
    library = tally.load(target)
    assert library is not None
    return library


@pytest.fixture
def library(built: tally.TallyLibrary, monkeypatch: pytest.MonkeyPatch) -> tally.TallyLibrary:
    monkeypatch.setattr(tally, "LIBRARY", built)
    return built


@pytest.fixture(params=[0, 1, 2], ids=["plain", "avx2", "avx512"])
def on_each_processor(
    library: tally.TallyLibrary, request: pytest.FixtureRequest
) -> tally.TallyLibrary:
    if library.use(request.param) < request.param:
        pytest.skip("this processor has no such instructions")
    return library


@pytest.fixture(autouse=True)
def best_again(built: tally.TallyLibrary) -> None:
    built.use(2)


def read(
    library: tally.TallyLibrary, tensor: torch.Tensor, threads: int = 1
) -> tally.Outcome | None:
    name = cases.title(tensor.dtype)
    reader = tally.Reader(library, name, tensor.nbytes, 1, stats=True, digest=True)
    return reader.read(tensor.data_ptr(), threads)


def by_numpy(tensor: torch.Tensor) -> TensorSummary:
    """The reference: what is there without the library."""
    name = cases.title(tensor.dtype)
    found, tally.LIBRARY = tally.LIBRARY, None
    try:
        raw = tensor.view(torch.uint8).numpy().view(host.STORAGE[name])
        return host.summarize_array(raw, name)
    finally:
        tally.LIBRARY = found


def assert_same(actual: TensorSummary | None, expected: TensorSummary, count: int) -> None:
    assert actual is not None
    for field in ("min", "max", "nan_count", "inf_count", "zero_count"):
        found, wanted = getattr(actual, field), getattr(expected, field)
        assert type(found) is type(wanted), field
        assert found == wanted, field
        if isinstance(found, float):
            assert math.copysign(1, found) == math.copysign(1, wanted), field
    cases.assert_close(actual.norm, expected.norm, 1e-13)
    finite = count - actual.nan_count - actual.inf_count
    scale = expected.norm / math.sqrt(finite) if expected.norm else 0.0
    cases.assert_close(actual.mean, expected.mean, 1e-13, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.title)
def test_equal_exact_arithmetic(on_each_processor: tally.TallyLibrary, dtype: torch.dtype) -> None:
    summarizer = Summarizer(digest=True)
    for _, tensor in cases.all_cases(dtype):
        result = summarizer.submit(tensor)
        assert result.error is None
        cases.assert_summary(result.summary, tensor)
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert result.digest == by_definition(data)


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.title)
@pytest.mark.parametrize("make", [cases.ordinary, cases.random_bits])
def test_equal_numpy_around_blocks_and_chunks(
    on_each_processor: tally.TallyLibrary, dtype: torch.dtype, make: object
) -> None:
    chunk = CHUNK_NBYTES // dtype.itemsize
    numbers = make(dtype, 2 * chunk + 4099)
    for count in (1, 15, 16, 17, 4095, 4096, 4097, chunk - 1, chunk, chunk + 1, numbers.numel()):
        part = numbers[numbers.numel() - count :].clone()
        outcome = read(on_each_processor, part)
        if outcome is None:  # a sum left its range: numpy does it over, with care
            assert dtype is torch.float64
            outcome = Summarizer(digest=True).submit(part).summary, None
        assert_same(outcome[0], by_numpy(part), count)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bits_at_any_address(built: tally.TallyLibrary, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    content = data.draw(st.binary(min_size=dtype.itemsize, max_size=300))
    content = content[: len(content) // dtype.itemsize * dtype.itemsize]
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    offset = data.draw(st.integers(0, 15))
    memory = ctypes.create_string_buffer(bytes(offset) + content, offset + len(content))
    name, address = cases.title(dtype), ctypes.addressof(memory) + offset
    reader = tally.Reader(built, name, len(content), 1, stats=True, digest=True)
    tensor = torch.frombuffer(bytearray(content), dtype=dtype)
    outcome = reader.read(address)
    if outcome is None:
        assert dtype is torch.float64
        return
    assert_same(outcome[0], by_numpy(tensor), tensor.numel())
    assert outcome[1] == by_definition(content)


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.title)
def test_threads_and_processors_change_no_bit(
    library: tally.TallyLibrary, dtype: torch.dtype
) -> None:
    tensor = cases.ordinary(dtype, (5 << 20) // dtype.itemsize + 777)
    if dtype.is_floating_point:
        tensor[[5, 70_000, -1]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    library.use(0)
    plain = read(library, tensor)
    assert plain is not None
    assert plain[0] is not None
    for level in (0, 1, 2):
        library.use(level)
        assert [read(library, tensor, threads) for threads in (1, 2, 4, 9)] == [plain] * 4
    assert Summarizer(digest=True).submit(tensor).digest == plain[1]
    assert Summarizer().submit(tensor).summary == plain[0]


def test_many_callers_at_once(library: tally.TallyLibrary) -> None:
    tensors = [cases.ordinary(torch.float32, 600_000, seed) for seed in range(3)]
    expected = [read(library, tensor) for tensor in tensors]
    found: dict[int, list[object]] = {0: [], 1: [], 2: []}

    def work(n: int) -> None:
        found[n].extend(read(library, tensors[n], 3) for _ in range(30))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(found[n] == [expected[n]] * 30 for n in range(3))


AFTER_A_FORK = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
from tensorprobe.tensors import tally
library = tally.load(Path(sys.argv[1]))
numbers = np.arange(1 << 20, dtype=np.float32)
def read(threads):
    reader = tally.Reader(library, "float32", numbers.nbytes, 1, stats=True, digest=True)
    return reader.read(numbers.ctypes.data, threads)
alone = read(1)
assert read(3) == alone
going = True
def keep_busy():
    while going:
        read(3)
busy = threading.Thread(target=keep_busy)
busy.start()
for _ in range(20):
    child = os.fork()
    if not child:
        os._exit(0 if read(3) == alone else 1)
    assert os.waitpid(child, 0)[1] == 0
going = False
busy.join()
print("done")
"""


def test_children_have_threads_of_their_own_and_nothing_waits_at_exit(
    built: tally.TallyLibrary,
) -> None:
    """Forked while another thread reads, too."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AFTER_A_FORK, str(built.path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.title)
def test_tensors_of_many_pieces(library: tally.TallyLibrary, dtype: torch.dtype) -> None:
    """Every other column, some of them repeated: pieces come from a buffer of numpy's."""
    wide = cases.ordinary(dtype, 700 * 400).view(700, 400)
    for tensor in (wide[:, ::2], wide[:, 3:390], wide[:, ::3].unsqueeze(1).expand(700, 2, 134)):
        result = Summarizer(digest=True).submit(tensor)
        whole = tensor.contiguous()
        assert_same(result.summary, by_numpy(whole.view(-1)), tensor.numel())
        assert result.digest == Summarizer(digest=True).submit(whole).digest


@pytest.mark.parametrize("large", [1e300, 1e-300, 5e-324, 1.7e308])
def test_what_left_the_range_is_left_to_numpy(library: tally.TallyLibrary, large: float) -> None:
    for count in (1, 40, 20_000):
        tensor = torch.full((count,), large, dtype=torch.float64)
        tensor[::3] *= -1
        assert read(library, tensor) is None
        strided = torch.stack([tensor, tensor], 1)[:, 0]
        for some in (tensor, strided):
            assert_same(Summarizer().submit(some).summary, by_numpy(tensor), count)


def test_zero_has_no_sign(library: tally.TallyLibrary) -> None:
    for values in ([0.0, -0.0], [-0.0, 0.0], [-0.0], [-0.0, math.nan]):
        for dtype in cases.FLOATS:
            tensor = torch.tensor(values, dtype=dtype)
            assert_same(Summarizer().submit(tensor).summary, by_numpy(tensor), len(values))


def test_subnormals_count_where_the_program_flushes_them(library: tally.TallyLibrary) -> None:
    tensor = torch.full((1 << 20,), 1e-40)
    expected = read(library, tensor)
    assert expected is not None
    assert expected[0] is not None
    assert (expected[0].zero_count, expected[0].min) == (0, tensor[0].item())
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not")
        assert [read(library, tensor, threads) for threads in (1, 4)] == [expected] * 2
        wide = read(library, torch.tensor([1.0, -1e-310], dtype=torch.float64))
        assert not torch.tensor([1e-40]).mul(1.0).any()  # still so
    finally:
        torch.set_flush_denormal(False)
    assert wide is not None
    assert wide[0] is not None
    assert (wide[0].min, wide[0].zero_count) == (-1e-310, 0)


def test_a_signal_that_reads_the_same_form_changes_nothing(library: tally.TallyLibrary) -> None:
    summarizer = Summarizer()
    big, other = torch.ones(4 << 20), torch.full((4 << 20,), -5.0)
    inside: list[TensorSummary | None] = []
    handler = lambda *_: inside.append(summarizer.submit(other, 1).summary)  # noqa: E731
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for turn in range(20):
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + turn * 0.0001)
            summary = summarizer.submit(big, 1).summary
            assert summary is not None
            assert (summary.min, summary.max) == (1.0, 1.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(summary is not None and summary.min == -5.0 for summary in inside)


def test_digests_of_bytes(library: tally.TallyLibrary) -> None:
    content = np.random.default_rng(0).integers(0, 256, 200_003, np.uint8)
    for size in (1, 7, 8, 9, 65535, 65536, 65537, content.size):
        expected = by_definition(content[:size].tobytes())
        assert digest_bytes(content[:size]) == expected
        digester = Digester()
        for start in range(0, size, 70_001):
            digester.update(content[start : min(start + 70_001, size)])
        assert digester.hexdigest() == expected


def test_without_the_library_numpy_does_the_same(
    library: tally.TallyLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [tensor for dtype in DTYPES for _, tensor in cases.all_cases(dtype)]
    with_it = [Summarizer(digest=True).submit(tensor) for tensor in tensors]
    monkeypatch.setattr(tally, "LIBRARY", None)
    for tensor, result in zip(tensors, with_it, strict=True):
        hidden = Summarizer(digest=True).submit(tensor)
        assert hidden.digest == result.digest
        if tensor.numel():
            assert_same(result.summary, hidden.summary, tensor.numel())
        else:
            assert result.summary == hidden.summary


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    stale, foreign = tmp_path / "stale.so", tmp_path / "foreign.so"
    foreign.write_bytes(b"for another machine")
    assert tally.load(foreign) is None
    assert tally.load(tmp_path / "none.so") is None
    source = tmp_path / "stale.c"
    source.write_text("int tally_version(void) { return 0; }")
    if shutil.which("cc") is None:
        pytest.skip("no compiler")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(stale)], check=True)
    assert tally.load(stale) is None


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler -O1", "no-such-compiler: No such file or directory"),
        ("false", "false: exit code 1"),
        ("'", "CC=': No closing quotation"),
    ],
)
def test_a_build_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert build.build(tmp_path / "libtally.so") == reason
    assert list(tmp_path.iterdir()) == []
