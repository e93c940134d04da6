"""Whose code is on the stack: found from what techniques import, for errors in files, kernels and compiled code."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rush
from rush.techniques import Use, registry
from rush.techniques.api.stacks import chain, compiler_failed, places, suspects

ROOT = Path(rush.__file__).resolve().parent


def uses(*names: str) -> list[Use]:
    known = registry()
    return [
        Use(known[name], {key: knob.default for key, knob in known[name].knobs.items()}) for name in names
    ]


def raised_through(*files: Path) -> BaseException:
    """An error that came through these files, the innermost last."""
    call: Callable[[], Any] = _fail
    for file in reversed(files):
        call = _in_file(file, call)
    with pytest.raises(ZeroDivisionError) as caught:
        call()
    return caught.value


def _fail() -> None:
    raise ZeroDivisionError("planted")


def _in_file(file: Path, inner: Callable[[], Any]) -> Callable[[], Any]:
    code: CodeType = compile("def through():\n    return inner()\n", str(file), "exec")
    names: dict[str, Any] = {"inner": inner}
    exec(code, names)
    made: Callable[[], Any] = names["through"]
    return made


def named(error: BaseException, *names: str) -> list[str]:
    return [suspect.technique.name for suspect in suspects(error, uses(*names))]


def test_a_techniques_own_file_names_it_and_nobody_else() -> None:
    error = raised_through(ROOT / "techniques" / "kernels" / "fused_projections.py")
    assert named(error, "compile", "fused_norm", "fused_projections") == ["fused_projections"]
    (found,) = suspects(error, uses("fused_projections"))
    assert str(found.place) == "rush/techniques/kernels/fused_projections.py:2, in through"
    assert found.file is None


@pytest.mark.parametrize(
    ("kernel", "technique"),
    [
        ("rmsnorm", "fused_norm"),
        ("layernorm", "fused_norm"),
        ("linear_cross_entropy", "fused_loss"),
        ("fp8_linear", "fp8"),
        ("adamw8bit", "adam8bit"),
        ("grad_norm", "fused_update"),
        ("flash_attention", "triton_attention"),
        ("fp16_linear", "fp16_matmul"),
        ("int8_linear", "int8_matmul"),
    ],
)
def test_a_kernel_names_the_technique_that_imports_it(kernel: str, technique: str) -> None:
    error = raised_through(ROOT / "kernels" / kernel / "triton.py")
    others = ["fused_bias", "gc_control", "amp_bf16", "checkpoint_full", "ddp"]
    assert named(error, technique, *others) == [technique]


def test_a_shared_helper_is_attributed_to_its_caller() -> None:
    helper, kernel = ROOT / "kernels" / "cpu" / "building.py", ROOT / "kernels" / "rmsnorm" / "__init__.py"
    assert named(raised_through(kernel, helper), "fused_norm", "fused_mlp") == ["fused_norm"]
    assert set(named(raised_through(helper), "fused_norm", "fused_mlp")) == {"fused_norm", "fused_mlp"}


def test_the_innermost_comes_first_and_who_only_passed_the_call_on_after_it() -> None:
    outer, inner = ROOT / "techniques" / "parallel" / "ddp.py", ROOT / "kernels" / "rope" / "triton.py"
    assert named(raised_through(outer, inner), "ddp", "fused_rope") == ["fused_rope", "ddp"]


def test_a_package_names_the_technique_that_imports_it() -> None:
    found = importlib.util.find_spec("torchao")
    if found is None or found.origin is None:
        pytest.skip("torchao is not installed")
    home = Path(found.origin).parent
    assert named(raised_through(home / "optim" / "adam.py"), "adam8bit", "compile") == ["adam8bit"]


def test_our_own_trainer_names_nobody() -> None:
    files = [
        ROOT / room
        for room in ("train/session.py", "train/saving.py", "parallel/sharded.py", "models/decoder.py")
    ]
    assert named(raised_through(*files), *registry()) == []


def test_every_kernel_belongs_to_a_technique() -> None:
    """So that none of them fails without a name. (The example in CUDA and what only serves others are no techniques.)"""
    for folder in sorted((ROOT / "kernels").iterdir()):
        if not (folder / "study.py").is_file() or folder.name in ("cross_entropy", "cuda_example"):
            continue
        assert named(raised_through(folder / "__init__.py"), *registry()), folder.name


def test_causes_are_followed_to_the_root_and_what_was_hidden_is_not() -> None:
    inner, outer, other = ValueError("inner"), KeyError("outer"), OSError("other")
    outer.__cause__ = inner
    assert chain(outer) == [outer, inner]
    outer.__cause__, outer.__context__, outer.__suppress_context__ = None, other, True
    assert chain(outer) == [outer]


class _Unsaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, None


class _Calls(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return _Unsaved.apply(x, x + 1, x + 2)  # type: ignore[no-untyped-call]


def test_code_that_the_compiler_was_tracing_is_found_in_its_message() -> None:
    """The compiler has no frame of it. (What it cannot trace under no_grad is what `fused_projections` once did.)"""
    compiled = torch.compile(_Calls().forward, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="save_for_backward") as caught:
        compiled(torch.ones(2))
    assert compiler_failed(caught.value)
    assert any(place.file == Path(__file__) and place.function == "forward" for place in places(caught.value))
    assert named(caught.value, "fused_norm", "compile") == ["compile"]


def test_an_error_in_what_runs_with_the_compiler_switched_off_is_not_the_compilers() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        torch.compiler.disable(_fail)()
    assert not compiler_failed(caught.value)
    assert named(caught.value, "compile") == []
