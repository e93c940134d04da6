# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Which launch shapes are best for the kernels that memory limits, on this GPU: every shape against Liger and a copy.

python scripts/tune_rows.py [--ops rope,swiglu] [--widths 2048,8192] [--seconds 85] [--out FILE]

The kernels choose by rules (`rush.kernels.support.row_tile` and `persistent_rows`, `BLOCK` and `NUM_WARPS` in their files), not
by autotuning: a choice made anew in every process would change the last bits of a weight's gradient from run to run.
This script is how the rules are checked. A variant is the kernel with some of those names replaced while it is called.
All cores compile, then for each op and width every variant's results and gradients are compared with float64, and they
take turns under the clock (`rush.hardware.stopwatch`: the cache is overwritten before each call). The quickest three are timed
once more, with the shape in use, Liger and a copy of as many bytes. The last thing printed is a table: what to change,
and what it gives.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rush.bench import kernel_check as check
from rush.bench.kernel_measure import one_line
from rush.hardware.stopwatch import CaseFailed, Effort, TimedCase, take_turns
from rush.kernels import norm_rows, partials, study
from rush.kernels.bias_grad import triton as bias_grad
from rush.kernels.gelu import triton as gelu
from rush.kernels.rope import triton as rope
from rush.kernels.study import Inputs, Size, Study
from rush.kernels.support import PersistentRows, RowTile, next_power_of_2
from rush.kernels.swiglu import triton as swiglu

OPS = ("rmsnorm", "layernorm", "rope", "swiglu", "bias_grad", "gelu")
ROWS = 16384
NOW, LIGER, COPY = "as it is", "Liger", "copy"
TARGETS = (2048, 8192)
"""Widths that the kernels have targets at: here all is tried, elsewhere only the shapes."""
FIRST_ROUND = Effort(least=7, most=9, budget_s=0.05)
LAST_ROUND = Effort(least=15, most=31, budget_s=0.1)


@dataclass(frozen=True)
class Variant:
    name: str
    changes: tuple[tuple[Any, str, Any], ...] = ()
    """Module, name in it, what stands there instead."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, name, value in self.changes:
                stack.enter_context(patch.object(module, name, value))
            yield


@dataclass(frozen=True)
class Group:
    """One op at one width: everything that shares its inputs."""

    op: str
    width: int
    add: bool = False

    def __str__(self) -> str:
        return f"{self.op} {self.width}{' with add' if self.add else ''}"


# What is tried.


def variants(group: Group) -> dict[str, list[Variant]]:
    """The variants of each pass."""
    op, width = group.op, group.width
    if op in ("swiglu", "gelu"):
        tried = _elementwise(swiglu if op == "swiglu" else gelu)
        return {"forward": tried, "backward": tried}
    if op == "rope":
        return {"forward": _turns()}
    sums = _sums() if width in TARGETS and not group.add else []
    if op == "bias_grad":
        return {"backward": _row_groups() + sums}
    walks = _walks(width, group.add)
    if group.add:
        return {"backward": walks}
    return {"forward": _tiles(width), "backward": walks + sums}


def _elementwise(module: Any) -> list[Variant]:
    shapes = ((1024, 4), (2048, 8), (4096, 8), (8192, 8))
    return [
        Variant(
            f"{block} elements, {warps} warps",
            ((module, "BLOCK", block), (module, "NUM_WARPS", warps)),
        )
        for block, warps in shapes
    ]


def _turns() -> list[Variant]:
    shapes = ((1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8))
    return [
        Variant(
            f"{places} tokens, {warps} warps",
            ((rope, "tile", lambda _, shape=(places, warps): shape),),
        )
        for places, warps in shapes
    ]


def _row_groups() -> list[Variant]:
    shapes = [(16, 256, 8, 3, rows) for rows in (64, 128, 256, 512)]
    shapes += [(16, 256, 8, 2, 128), (16, 256, 8, 1, 128), (8, 256, 8, 3, 128), (8, 256, 8, 1, 128)]
    shapes += [(16, 128, 4, 3, 128), (16, 128, 4, 3, 256), (32, 128, 8, 3, 256)]
    names = ("ROWS", "COLUMNS", "NUM_WARPS", "STAGES")
    return [
        Variant(
            f"{shape[0]} × {shape[1]}, {shape[2]} warps, {shape[3]} stages, {shape[4]} rows a program",
            (
                *((bias_grad, name, value) for name, value in zip(names, shape[:4], strict=True)),
                (bias_grad, "program_rows", lambda *_, rows=shape[4]: rows),
            ),
        )
        for shape in shapes
    ]


def _shapes(width: int) -> list[tuple[int, int]]:
    """Rows at a time, and warps, with 8 to 32 elements a thread."""
    block = next_power_of_2(width)
    warps = sorted({min(32, max(4, block // columns)) for columns in (256, 512, 1024)})
    return [
        (rows, w)
        for w in warps
        for rows in (1, 2, 4)
        if 8 <= rows * block // (32 * w) <= 32 and block // (32 * w) <= 32
    ]


def _tiles(width: int) -> list[Variant]:
    found = []
    for rows, warps in _shapes(width):
        tile = RowTile(rows, next_power_of_2(width), warps)
        change = (norm_rows, "row_tile", lambda *_, tile=tile, **__: tile)
        found.append(Variant(f"{rows} rows, {warps} warps", (change,)))
    return found


def _walks(width: int, add: bool) -> list[Variant]:
    """The product's walk with other figures."""
    block, found = next_power_of_2(width), []
    for rows, warps in _shapes(width):
        elements = rows * block // (32 * warps)
        # Warps of a multiprocessor, by the registers that so many elements take.
        for together in {8: (24, 32), 16: (16, 24), 32: (8, 16)}[elements]:
            for stages in (2, 3, 4) if (elements, together) == (16, 16) and not add else (3,):
                walk = PersistentRows(rows, block, warps, stages, max(1, together // warps))
                shared = rows * block * 2 * (3 if add else 2) * (stages - 1)
                if shared * walk.programs_per_sm <= 220_000:
                    name = f"{rows} rows, {warps} warps, {stages} stages, {walk.programs_per_sm} programs"
                    found.append(Variant(name, ((norm_rows, "persistent_rows", lambda *_, walk=walk: walk),)))
    return list({variant.name: variant for variant in found}.values())


def _sums() -> list[Variant]:
    """The small sum at the end: its tile."""
    return [
        Variant(
            f"sums of {rows} × {columns}",
            ((partials, "PARTIALS", rows), (partials, "COLUMNS", columns)),
        )
        for rows, columns in ((64, 16), (128, 8), (128, 16), (128, 32), (512, 8), (512, 16))
    ]


# Compiling, checking, timing.


def say(line: str = "") -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def size_of(group: Group, rows: int) -> Size:
    if group.op != "rope":
        return Size("", {"rows": rows, "columns": group.width, "add": int(group.add)})
    head_dim = min(128 if group.width >= 4096 else 64, group.width)
    heads, batch = group.width // head_dim, 8 if rows % 8 == 0 else 1
    return Size("", {"batch": batch, "positions": rows // batch, "heads": heads,
                     "kv_heads": 8 if heads % 8 == 0 else heads, "head_dim": head_dim})  # fmt: skip


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inputs_of(group: Group, rows: int) -> Inputs:
    device = device_here()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return study.load(group.op).make(size_of(group, rows), device, dtype)


def results_of(
    variant: Variant, step: str, call: study.Call, inputs: Inputs, grad_outputs: list[Tensor] | None
):
    """Results and gradients, the pass that is under test made by this variant."""
    forward, backward = (variant, Variant(NOW)) if step == "forward" else (Variant(NOW), variant)
    with forward.applied():
        outputs = check.outputs_of(call, inputs)
    names = ["the result"] if len(outputs) == 1 else [f"result {i + 1}" for i in range(len(outputs))]
    found = {name: output.detach() for name, output in zip(names, outputs, strict=True)}
    with backward.applied():
        above = check.random_grad_outputs(outputs) if grad_outputs is None else check.copies(grad_outputs)
        return found | check.backward_of(outputs, inputs, above)


def compile_one(group: Group, rows: int, step: str, name: str) -> None:
    """In a process of its own: fill Triton's cache. With the rows that are measured, for Triton makes a kernel of its own
    for figures that 16 divides."""
    (variant,) = [each for each in [Variant(NOW), *variants(group).get(step, [])] if each.name == name]
    results_of(variant, step, contender(study.load(group.op), "ours").call, inputs_of(group, rows), None)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def compile_all(pool: ProcessPoolExecutor, groups: list[Group], rows: int) -> None:
    """Every variant, by all cores at once; first what they share, so that few compile the same."""
    shared = [(group, rows, "", NOW) for group in groups]
    # The kernels of elements do not know the width.
    first_of = {group.op: group for group in reversed(groups)}
    own = [
        (group, rows, step, variant.name)
        for group in groups
        if group.op not in ("swiglu", "gelu", "bias_grad") or first_of[group.op] is group
        for step, tried in variants(group).items()
        for variant in tried
    ]
    for jobs in (shared, own):
        # A variant that fails is told where it is measured; what is late, or was lost, is compiled there.
        late = wait([pool.submit(compile_one, *job) for job in jobs], timeout=45).not_done
        for future in late:
            future.cancel()


def contender(of: Study, kind: str) -> study.Contender:
    return next(each for each in of.contenders if each.kind == kind)


def measure(group: Group, rows: int) -> dict[str, dict[str, Any]]:
    """For each pass: microseconds of every variant in its last round, and what failed."""
    of, device = study.load(group.op), device_here()
    inputs, ours = inputs_of(group, rows), contender(of, "ours")
    dtype = next(iter(inputs.values())).dtype
    plain = contender(of, "plain").call
    expected, grad_outputs = check.exact_results(of.reference, plain, inputs, torch.float64, dtype)
    found: dict[str, dict[str, Any]] = {}
    for step, tried in variants(group).items():
        cases: dict[str, TimedCase] = {}
        failed: dict[str, str] = {}
        for variant in [Variant(NOW), *tried]:
            try:
                results = results_of(variant, step, ours.call, inputs, grad_outputs)
                judged = check.judge(ours, results, expected)
                if judged["verdict"] == "equal":
                    cases[variant.name] = case(step, variant, ours.call, inputs, grad_outputs)
                else:
                    failed[variant.name] = judged["why"]
            except Exception as error:
                failed[variant.name] = one_line(error)
        rival = next((each for each in of.contenders if each.name == LIGER), None)
        if rival is not None and rival.absent(device) is None:
            theirs = check.fresh(inputs), check.copies(grad_outputs)  # it writes into both
            cases[LIGER] = case(step, Variant(LIGER), rival.call, *theirs)
        num_bytes = of.work(size_of(group, rows), dtype.itemsize, step).bytes  # type: ignore[arg-type]
        source = torch.zeros(int(num_bytes) // 2, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        cases[COPY] = TimedCase(lambda: None, partial(_copied, target, source))
        found[step] = {"failed": failed, "first_us": time_in_turns(cases, FIRST_ROUND, failed)}
        quickest = sorted(found[step]["first_us"], key=found[step]["first_us"].__getitem__)
        mine = [name for name in quickest if name not in (LIGER, COPY)][:3]
        last = {name: each for name, each in cases.items() if name in (NOW, LIGER, COPY, *mine)}
        found[step]["us"] = time_in_turns(last, LAST_ROUND, failed)
    return found


def _copied(target: Tensor, source: Tensor, _: object) -> Tensor:
    return target.copy_(source)


def case(
    step: str, variant: Variant, call: study.Call, inputs: Inputs, grad_outputs: list[Tensor]
) -> TimedCase:
    def forward() -> tuple[Tensor, ...]:
        with variant.applied():
            return check.outputs_of(call, inputs)

    def backward(outputs: tuple[Tensor, ...]) -> object:
        with variant.applied():
            return check.backward_of(outputs, inputs, grad_outputs)

    if step == "forward":
        return TimedCase(lambda: None, lambda _: forward())
    return TimedCase(forward, backward)


def time_in_turns(cases: dict[str, TimedCase], effort: Effort, failed: dict[str, str]) -> dict[str, float]:
    """Medians in microseconds; one that fails is taken out, and the others begin again."""
    while cases:
        try:
            # Interpreted, the figures mean nothing; one of each shows that all is well.
            rounds = effort if device_here().type == "cuda" else Effort(1, 1)
            times = take_turns(cases, device_here(), rounds)
            return {name: 1000 * statistics.median(samples) for name, samples in times.items()}
        except CaseFailed as error:
            failed[error.name] = one_line(error.problem)
            del cases[error.name]
    return {}


def report(done: Mapping[str, dict[str, dict[str, Any]]]) -> None:
    """The table: per op, width and pass the best of ours, in microseconds, against a copy, Liger and what is in use."""
    say(f"\n{'':32}{'as it is':>16}{'best':>16}{'over it':>9}{'over Liger':>12}  which")
    for label, steps in done.items():
        for step, told in steps.items():
            us = told["us"]
            ours = {name: time for name, time in us.items() if name not in (LIGER, COPY)}
            if NOW not in ours or COPY not in us:
                say(f"{label + ', ' + step:32} not measured")
                continue
            best = min(ours, key=lambda name: ours[name])

            def cell(name: str, us: Mapping[str, float] = us) -> str:
                return f"{us[name]:.1f} ({us[COPY] / us[name]:4.0%})"

            over = f"{us[LIGER] / us[best]:.3f}" if LIGER in us else "-"
            gain = us[NOW] / us[best]
            say(f"{label + ', ' + step:32}{cell(NOW):>16}{cell(best):>16}{gain:>9.3f}{over:>12}  {best}")
    say("µs (share of the rate of a copy of as many bytes)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--widths", default="2048,8192,4096,768")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument(
        "--seconds", type=float, default=85.0, help="what is not measured by then is left out"
    )
    parser.add_argument("--out", type=Path, help="every time and failure, as JSON")
    options = parser.parse_args()
    began = time.monotonic()
    widths, cuda = [int(word) for word in options.widths.split(",")], device_here().type == "cuda"
    done: dict[str, dict[str, dict[str, Any]]] = {}
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        # Two widths at a time: what there is no time for is not compiled either.
        for some in (widths[:2], widths[2:]):
            groups = [
                Group(op, width, add)
                for width in some
                for op in options.ops.split(",")
                for add in (False, True)
                if not add or (op in ("rmsnorm", "layernorm") and width in TARGETS)
            ]
            if cuda and time.monotonic() - began < options.seconds - 30:
                try:
                    compile_all(pool, groups, options.rows)
                except BrokenProcessPool as error:
                    say(f"the compiling processes died: {error}")
                say(f"compiled for {some} after {time.monotonic() - began:.0f} s")
            for group in groups:
                if time.monotonic() - began > options.seconds:
                    say(f"{group}: no time left")
                    continue
                measure_and_tell(group, options.rows, done)
                if options.out:
                    options.out.write_text(json.dumps(done, indent=1))
    report(done)
    where = torch.cuda.get_device_name() if cuda else "interpreted: no speeds"
    say(f"{where}, Triton {triton.__version__}, {time.monotonic() - began:.0f} s")
    return 0


def measure_and_tell(group: Group, rows: int, done: dict[str, dict[str, dict[str, Any]]]) -> None:
    try:
        done[str(group)] = measure(group, rows)
    except Exception as error:
        say(f"{group}: {one_line(error)}")
        return
    for step, told in done[str(group)].items():
        say(f"\n{group}, {step}: µs of all, and of those in the last round")
        for name, us in sorted(told["first_us"].items(), key=lambda pair: pair[1]):
            last = f"{told['us'][name]:8.1f}" if name in told["us"] else " " * 8
            say(f"  {us:8.1f} {last}  {name}")
        for name, why in told["failed"].items():
            say(f"  failed: {name}: {why}")


if __name__ == "__main__":
    sys.exit(main())
