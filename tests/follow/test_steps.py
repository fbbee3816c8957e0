"""A step ends where a person would say it does, without the program saying so."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_file
from torch.optim import optimizer as optimizer_file
from torch.overrides import _get_current_function_mode_stack

import tensorprobe as tp
from tensorprobe.errors import NothingRecorded
from tensorprobe.follow.steps import StepOn

Program = Callable[[], Any]


@pytest.fixture(autouse=True)
def _nothing_left_installed() -> Iterator[None]:
    engine = torch.autograd.graph._engine_run_backward
    yield
    assert _get_current_function_mode_stack() == []
    assert not module_file._global_forward_pre_hooks
    assert not module_file._global_forward_hooks
    assert not optimizer_file._global_optimizer_pre_hooks
    assert not optimizer_file._global_optimizer_post_hooks
    assert torch.autograd.graph._engine_run_backward is engine


def quiet(text: str) -> None:
    pass


def record(path: Path, program: Program, step_on: StepOn = "auto", **options: Any) -> tp.Recorder:
    with tp.Recorder(path, step_on=step_on, log=quiet, **options) as recorder:
        program()
    return recorder


def steps_of(path: Path, *names: str) -> dict[int, list[str]]:
    """The calls of these names, without prefix and number, by step."""
    steps: dict[int, list[str]] = {}
    for call in tp.load(path).calls:
        if call.direction == "forward" and any(name in call.name for name in names):
            steps.setdefault(call.step, []).append(next(n for n in names if n in call.name))
    return steps


def classifier() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_each_optimizer_step_ends_a_step_and_numbers_begin_anew(tmp_path: Path) -> None:
    record(tmp_path, lambda: train(*classifier(), 3))
    capture = tp.load(tmp_path)
    for step in (0, 1, 2):
        linear = [c.name for c in capture.calls(step=step, name="Functional.linear.*.forward")]
        assert linear == ["Functional.linear.0.forward", "Functional.linear.1.forward"]
        assert [c.name for c in capture.calls(step=step, name="Optimizer")] == [
            "Optimizer.SGD.step.0"
        ]


def test_the_gan_goes_by_the_optimizer_that_stepped_first(tmp_path: Path) -> None:
    class Generator(nn.Linear):
        pass

    class Discriminator(nn.Linear):
        pass

    def gan() -> None:
        generator, judge = Generator(2, 3), Discriminator(3, 1)
        of_generator = torch.optim.Adam(generator.parameters())
        of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
        for _ in range(3):
            noise = torch.ones(4, 2)
            (judge(generator(noise).detach()).mean() - judge(torch.ones(4, 3)).mean()).backward()
            of_judge.step()
            judge(generator(noise)).mean().backward()
            of_generator.step()

    optimizers = "Optimizer.SGD", "Optimizer.Adam"
    record(tmp_path / "auto", gan)
    assert steps_of(tmp_path / "auto", *optimizers) == {
        0: ["Optimizer.SGD"],
        1: ["Optimizer.Adam", "Optimizer.SGD"],
        2: ["Optimizer.Adam", "Optimizer.SGD"],
        3: ["Optimizer.Adam"],
    }
    record(tmp_path / "second", gan, step_on=1)
    assert steps_of(tmp_path / "second", *optimizers) == {
        step: ["Optimizer.SGD", "Optimizer.Adam"] for step in (0, 1, 2)
    }
    # a narrow recording has the names of the full one
    record(tmp_path / "narrow", gan, steps="2")
    full, narrow = tp.load(tmp_path / "auto"), tp.load(tmp_path / "narrow")
    assert [c.name for c in narrow.calls] == [c.name for c in full.calls(step=2)]


def test_accumulated_gradients_are_one_step(tmp_path: Path) -> None:
    def accumulate() -> None:
        model, optimizer = classifier()
        for _ in range(2):
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    record(tmp_path, accumulate)
    assert steps_of(tmp_path, "Module.Sequential.forward", "Optimizer") == {
        step: ["Module.Sequential.forward"] * 3 + ["Optimizer"] for step in (0, 1)
    }


def scaled_training(factors: list[float], n_optimizers: int = 1) -> Program:
    """Training with a GradScaler, which skips where a factor is inf."""

    def program() -> None:
        model, _ = classifier()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(n_optimizers)]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in factors:
            for optimizer in optimizers:
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 3)).sum() * factor).backward()
                scaler.step(optimizer)
                scaler.update()

    return program


@pytest.mark.parametrize("factors", [[1, torch.inf, 1], [torch.inf, torch.inf, 1], [1, 1, 1]])
@pytest.mark.parametrize("steps", [None, "0-2", "2"])
def test_a_step_that_the_scaler_skips_is_a_step(
    tmp_path: Path, factors: list[float], steps: str | None
) -> None:
    record(tmp_path, scaled_training(factors), steps=steps)
    found = steps_of(tmp_path, "Module.Sequential.forward", "Optimizer")
    stepped = ["Module.Sequential.forward", "Optimizer"]
    for step, factor in enumerate(factors):
        if steps is None or step >= int(steps[0]):
            assert found[step] == (stepped[:1] if factor == torch.inf else stepped)


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_a_scaler_that_comes_later(tmp_path: Path, level: str) -> None:
    def program() -> None:
        model, _ = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (None, None, torch.inf, torch.inf, torch.inf, 1):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).sum()
            if factor is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss * factor).backward()
                scaler.step(optimizer)
                scaler.update()

    record(tmp_path, program, level=level)
    found = steps_of(tmp_path, "Optimizer")
    assert [step for step, calls in found.items() if calls] == [0, 1, 4]  # its first skip is missed


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_a_scaler_that_comes_after_inference(tmp_path: Path, level: str) -> None:
    def program() -> None:
        model, _ = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with torch.no_grad():
            model(torch.ones(2, 3))
            model(torch.ones(2, 3))
        for factor in (torch.inf, torch.inf, 1):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 3)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    record(tmp_path, program, level=level)
    assert sorted(steps_of(tmp_path, "Optimizer")) == [4]  # two of inference, two skipped


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_a_late_scaler_that_skips_one_of_two_optimizers(tmp_path: Path, level: str) -> None:
    def program() -> None:
        models = [classifier()[0] for _ in range(2)]
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (None, torch.inf, torch.inf, torch.inf, 1):
            losses = [model(torch.ones(2, 3)).sum() for model in models]
            if factor is None:
                (losses[0] + losses[1]).backward()
                first.step()
                second.step()
            else:
                scaler.scale(losses[0] * factor).backward()
                scaler.scale(losses[1]).backward()
                scaler.step(first)
                scaler.step(second)
                scaler.update()
            first.zero_grad()
            second.zero_grad()

    record(tmp_path, program, level=level)
    # the second steps when the step of the first is over; the first skip is missed
    counts = {step: len(calls) for step, calls in steps_of(tmp_path, "Optimizer").items()}
    assert counts == {0: 1, 1: 3, 2: 1, 3: 1, 4: 1}


def test_the_round_of_another_optimizer_is_not_a_skip(tmp_path: Path) -> None:
    record(tmp_path, scaled_training([1, 1], n_optimizers=2))
    assert {k: len(v) for k, v in steps_of(tmp_path, "Optimizer").items()} == {0: 1, 1: 2, 2: 1}


def test_lbfgs_with_its_many_closures_is_one_step(tmp_path: Path) -> None:
    def fit() -> None:
        model, _ = classifier()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 3)).pow(2).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    record(tmp_path, fit)
    found = steps_of(tmp_path, "Module.Sequential.forward", "Optimizer.LBFGS")
    assert sorted(found) == [0, 1]
    assert found[0][0] == "Optimizer.LBFGS"
    assert found[0].count("Module.Sequential.forward") > 1


def test_each_forward_of_generate_is_a_step(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=16, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()

    def generate() -> None:
        prompt = torch.tensor([[1, 2, 3]])
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
        )

    record(tmp_path / "all", generate)
    full = tp.load(tmp_path / "all")
    assert full.steps == (0, 1, 2, 3)
    record(tmp_path / "third", generate, steps="2")
    narrow = tp.load(tmp_path / "third")
    assert narrow.steps == (2,)
    assert [c.name for c in narrow.calls] == [c.name for c in full.calls(step=2)]


def test_evaluation_between_training_steps_belongs_to_the_next_one(tmp_path: Path) -> None:
    def program() -> None:
        model, optimizer = classifier()
        for _ in range(2):
            train(model, optimizer)
            with torch.no_grad():
                model(torch.ones(1, 3))
                model(torch.ones(1, 3))
        train(model, optimizer)

    record(tmp_path, program)
    forwards = steps_of(tmp_path, "Module.Sequential.forward")
    assert {step: len(names) for step, names in forwards.items()} == {0: 1, 1: 3, 2: 3}


def test_evaluation_before_training_has_steps_of_its_own(tmp_path: Path) -> None:
    def program() -> None:
        model, optimizer = classifier()
        with torch.no_grad():
            model(torch.ones(1, 3))
            model(torch.ones(1, 3))
        train(model, optimizer, 2)

    record(tmp_path, program)
    forwards = steps_of(tmp_path, "Module.Sequential.forward")
    assert {step: len(names) for step, names in forwards.items()} == {0: 1, 1: 1, 2: 1, 3: 1}


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an Optimizer that steps another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Derived(torch.optim.SGD):
    """Steps as its base does, and more."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


def test_a_step_that_calls_that_of_its_base(tmp_path: Path) -> None:
    """Torch calls the hooks of both, as there has been an optimizer of the base itself."""

    def program() -> None:
        model, _ = classifier()
        train(model, Derived(model.parameters(), lr=0.1), 3)

    record(tmp_path, program)
    assert steps_of(tmp_path, "Optimizer.Derived") == {
        step: ["Optimizer.Derived"] for step in (0, 1, 2)
    }


def test_an_optimizer_around_another_steps_once(tmp_path: Path) -> None:
    def program() -> None:
        model, optimizer = classifier()
        train(model, Wrapper(optimizer), 3)

    record(tmp_path, program)
    assert steps_of(tmp_path, "Optimizer.Wrapper", "Optimizer.SGD") == {
        step: ["Optimizer.Wrapper", "Optimizer.SGD"] for step in (0, 1, 2)
    }


def test_a_step_that_raises_does_not_stop_the_counting(tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ValueError("not today")

    def program() -> None:
        model, optimizer = classifier()
        with pytest.raises(ValueError, match="not today"):
            train(model, Failing(model.parameters(), lr=0.1))
        train(model, optimizer, 2)

    record(tmp_path, program)
    assert tp.load(tmp_path).steps == (0, 1)


def test_an_optimizer_made_anew_goes_on(tmp_path: Path) -> None:
    def program() -> None:
        model, _ = classifier()
        for _ in range(3):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    record(tmp_path, program)
    assert tp.load(tmp_path).steps == (0, 1, 2)


@pytest.mark.parametrize("steps", [None, "0", "1"])
def test_optimizers_that_step_inside_of_backward(tmp_path: Path, steps: str | None) -> None:
    def program() -> None:
        model, _ = classifier()
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()

    record(tmp_path, program, steps=steps)
    found = steps_of(tmp_path, "Module.Sequential.forward", "Optimizer")
    wanted = [0, 1, 2] if steps is None else [int(steps)]
    assert found == {step: ["Module.Sequential.forward"] + ["Optimizer"] * 4 for step in wanted}


def test_module_as_the_measure(tmp_path: Path) -> None:
    def program() -> None:
        model, _ = classifier()
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()

    record(tmp_path, program, step_on="module", steps="1-2")
    assert steps_of(tmp_path, "Module.Sequential.forward") == {
        step: ["Module.Sequential.forward"] for step in (1, 2)
    }


def test_the_program_may_say_it_itself(tmp_path: Path) -> None:
    model, optimizer = classifier()
    with tp.Recorder(tmp_path, log=quiet, steps="1") as recorder:
        for _ in range(3):
            train(model, optimizer, 2)
            recorder.step()
    assert len(steps_of(tmp_path, "Optimizer")[1]) == 2


def test_unwanted_steps_have_no_mode_and_no_hooks(tmp_path: Path) -> None:
    seen: list[tuple[int, int, bool]] = []
    engine = torch.autograd.graph._engine_run_backward

    class Spy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            patched = torch.autograd.graph._engine_run_backward is not engine
            seen.append(
                (
                    len(_get_current_function_mode_stack()),
                    len(module_file._global_forward_pre_hooks),
                    patched,
                )
            )
            return x

    def program() -> None:
        model = nn.Sequential(nn.Linear(3, 3), Spy())
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 5)

    record(tmp_path, program, steps="2")
    on, off = (1, 1, True), (0, 0, False)
    assert seen == [on, off, on, off, off]  # the first step is watched for what sets the pace


def test_at_l2_a_function_mode_is_on_in_the_first_step_alone(tmp_path: Path) -> None:
    seen: list[int] = []

    class Spy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(_get_current_function_mode_stack()))
            return x

    def program() -> None:
        model = nn.Sequential(nn.Linear(3, 3), Spy())
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)

    record(tmp_path, program, level="L2")
    assert seen == [1, 0, 0]


def test_calls_not_selected_consume_their_number(tmp_path: Path) -> None:
    record(tmp_path, lambda: train(*classifier(), 2), modules="2")
    linear = [c.name for c in tp.load(tmp_path).calls(step=1, name="Functional.linear.*.forward")]
    assert linear == ["Functional.linear.1.forward"]


def test_stopping_after_the_last_step(tmp_path: Path) -> None:
    said: list[str] = []
    model, optimizer = classifier()
    with pytest.raises(SystemExit) as leaving:
        with tp.Recorder(
            tmp_path, step_on="auto", log=said.append, steps="0-1", stop_after_last_step=True
        ):
            train(model, optimizer, 10)
    assert leaving.value.code == 0
    assert said[0] == "steps 0-1 are recorded: ending the program"
    assert tp.load(tmp_path).steps == (0, 1)


def test_what_follows_the_last_step_is_not_counted_as_one(tmp_path: Path) -> None:
    """A loss that is read when the optimizer has stepped is in the next step, if there is one."""
    said: list[str] = []

    def program() -> None:
        model, optimizer = classifier()
        for _ in range(2):
            loss = model(torch.ones(2, 3)).sum()
            loss.backward()
            optimizer.step()
            loss.item()

    with tp.Recorder(tmp_path / "a", step_on="auto", log=said.append):
        program()
    assert " in 2 steps and after them, " in said[-1]
    assert tp.load(tmp_path / "a").steps == (0, 1, 2)
    with tp.Recorder(tmp_path / "b", step_on="auto", log=said.append):
        train(*classifier(), 2)
    assert " in 2 steps, " in said[-1]
    with pytest.raises(NothingRecorded, match=r"the steps that ran were 0-1\.$"):
        record(tmp_path / "c", program, steps=7, strict=True)


def test_a_program_that_ends_within_its_second_step(tmp_path: Path) -> None:
    said: list[str] = []
    model, optimizer = classifier()
    with tp.Recorder(tmp_path / "a", log=said.append) as recorder:
        train(model, optimizer)
        recorder.step()
        model(torch.ones(2, 3))
    assert " in 2 steps, " in said[-1]


def test_a_program_that_begins_to_say_when_steps_end(tmp_path: Path) -> None:
    """Its first step is not counted twice, where an optimizer had ended it before it said so."""
    model, optimizer = classifier()
    recorder = tp.Recorder(tmp_path, step_on="auto", log=quiet).start()
    for _ in range(3):
        train(model, optimizer)
        recorder.step()
    recorder.close()
    assert list(steps_of(tmp_path, "SGD")) == [0, 1, 2]
