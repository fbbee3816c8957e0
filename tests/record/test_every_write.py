"""Whatever operator of torch has written to a tensor, the next call is recorded with what it got.

Each operator writes through `.data`, so that no version tells.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorprobe as tp
from record.writing_operators import full_name, schemas, written_by
from tensorprobe import native

pytestmark = pytest.mark.slow

# Not called here, and why.
SKIPPED = {
    r"_mkldnn|_coalesced|.*sparse": "tensors that have no plain memory",
    r"_sobol_engine": "crashes torch if its state is not its own",
    r"_philox|_fill_mem_eff|_flash": "no kernel on the CPU",
    r"requires_grad_|detach_": "writes no content",
    r"set_?\.source_Storage": "takes a storage, which has no version at all",
    r"_resize_output": "must have the shape already",
}
_IS_SKIPPED = re.compile("aten::(" + "|".join(SKIPPED) + ")")


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(native, "MODULE", None)
    elif native.MODULE is None:
        pytest.skip("not built: python -m tensorprobe.native.build")
    return str(request.param)


def called() -> list[Any]:
    """The operators that are tried: all that write in place, and those that do it to `out` as well.

    Other operators ask for more of their arguments than a schema says, and some do not check it.
    """
    tried = [schema for schema in schemas() if not _IS_SKIPPED.match(full_name(schema))]
    in_place = {schema.name for schema in tried if schema.name.endswith("_")}
    return [
        schema
        for schema in tried
        if schema.name in in_place
        or (f"{schema.name}_" in in_place and not schema.name.startswith("aten::_f"))
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("level", "apis"), [("L1", None), ("L1", "clone"), ("L2", None)])
def test_the_next_call_is_recorded_with_what_it_was_given(
    level: str, apis: str | None, way: str, tmp_path: Path
) -> None:
    found = [(full_name(schema), written_by(schema)) for schema in called()]
    writes = [(name, written) for name, written in found if written is not None]
    assert [name for name, written in found if written is None and "out" not in name] == []
    assert len(writes) > 400
    cloned: list[tuple[str, torch.Tensor]] = []
    changed = 0
    with tp.Recorder(
        tmp_path, level=level, keep="tensors", apis=apis, stacks=False, log=lambda text: None
    ):
        for name, written in writes:
            before = [tensor.clone() for tensor in written.tensors]
            written.call()
            after = [tensor.clone() for tensor in written.tensors]
            cloned += [(name, tensor) for tensor in (*before, *after)]
            changed += any(map(differ, before, after))
    calls = [call for call in tp.load(tmp_path).calls if ".clone." in call.name]
    assert [
        name
        for (name, tensor), call in zip(cloned, calls, strict=True)
        if differ(call.tensor("input.0").load(), tensor)
    ] == []
    assert changed > 0.9 * len(writes)


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
