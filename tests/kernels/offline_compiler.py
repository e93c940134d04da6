"""Triton's compiler for a GPU that is not there: real launches, up to the point where a driver would start them.

Run as a process of its own (`python offline_compiler.py …`), because Triton decides at import whether kernels are
interpreted. It puts a driver in place that says which GPU it is and forgets every launch. All before that is Triton's
own: how arguments are typed and specialized, the compiler down to machine code, the check for shared memory. What was
compiled is found in the kernels' caches afterwards and described in a report.

The launches come from a module with `LAUNCHES`, names and functions without arguments that call kernels on the CPU's
tensors, and `PACKAGES`, where kernels are looked for.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import pkgutil
import re
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, KernelInterface

SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}
"""Shared memory a program may have. For 80 that of the consumer cards (8.6, 8.9), which run the same code with less."""


class Launcher:
    """Takes a launch and does nothing."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Driver:
    """What Triton asks a driver before and at a launch, answered for a GPU of this architecture."""

    launcher_cls = Launcher

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self.architecture]}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), object(), 0, 0, 1024

    def unload_module(self, module: object) -> None:
        pass


def jit_functions(packages: list[str]) -> dict[str, JITFunction]:
    """Every function of these packages that Triton compiles, by its full name."""
    modules = [importlib.import_module(package) for package in packages]
    for module in list(modules):
        inside = pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}.")
        modules.extend(importlib.import_module(found.name) for found in inside)
    kernels = [_without_tuner(value) for module in modules for value in vars(module).values()]
    return {full_name(kernel): kernel for kernel in kernels if isinstance(kernel, JITFunction)}


def _without_tuner(value: Any) -> Any:
    while isinstance(value, KernelInterface) and not isinstance(value, JITFunction):
        value = value.fn
    return value


def full_name(function: JITFunction) -> str:
    return f"{function.fn.__module__}.{function.fn.__qualname__}"


def called_by(function: JITFunction) -> Iterator[JITFunction]:
    """The compiled functions that this one's source names."""
    names = function.fn.__globals__
    for node in ast.walk(function.parse()):
        value = None
        if isinstance(node, ast.Name):
            value = names.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            value = getattr(names.get(node.value.id), node.attr, None)
        if isinstance(value, JITFunction):
            yield value


def reached(launched: list[JITFunction]) -> set[str]:
    """The names of these functions, of what they call, and so on."""
    names: set[str] = set()
    ahead = list(launched)
    while ahead:
        function = ahead.pop()
        if full_name(function) not in names:
            names.add(full_name(function))
            ahead.extend(called_by(function))
    return names


def describe(function: JITFunction, kernel: Any) -> dict[str, Any]:
    """What can be said of machine code without running it."""
    ptx, usage = kernel.asm["ptx"], resources(kernel.asm["cubin"])
    return {
        "kernel": full_name(function),
        "types": {name: str(kind) for name, kind in kernel.src.signature.items() if kind != "constexpr"},
        "constants": {
            function.arg_names[path[0]]: str(value) for path, value in kernel.src.constants.items()
        },
        "num_warps": kernel.metadata.num_warps,
        "num_stages": kernel.metadata.num_stages,
        "shared_bytes": kernel.metadata.shared,
        "registers": usage["REG"],
        # What does not fit into registers lives in a frame on the stack, in device memory.
        "stack_bytes": usage["STACK"],
        "loads": widths(ptx, "ld"),
        "stores": widths(ptx, "st"),
        "target": f"sm_{kernel.metadata.target.arch}",
        "instructions": {
            name: ptx.count(name) for name in ("wgmma.mma_async", "mma.sync", "cp.async.bulk.tensor")
        },
    }


def resources(binary: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, as the tool that comes with Triton reads them from the binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", told)}


def widths(ptx: str, kind: str) -> dict[int, int]:
    """How many instructions load from (or store to) device memory, by the bytes a thread moves with each."""
    counts: dict[int, int] = {}
    for vector, bits in re.findall(rf"{kind}\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b", ptx):
        width = int(vector or 1) * int(bits) // 8
        counts[width] = counts.get(width, 0) + 1
    if kind == "ld":
        for size in re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (?:0x)?(\w+)[,;]", ptx):
            width = int(size, 16)
            counts[width] = counts.get(width, 0) + 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("report", type=Path)
    parser.add_argument("--architecture", type=int, default=90)
    parser.add_argument("--only", nargs="*", default=[], help="these launches instead of all")
    parser.add_argument("--note", nargs="*", default=[], help="launches that are noted and not compiled")
    options = parser.parse_args()
    driver.set_active(Driver(options.architecture))
    torch.cuda.get_device_capability = lambda device=None: divmod(options.architecture, 10)

    module = importlib.import_module(options.module)
    functions = jit_functions(module.PACKAGES)
    # From here on operators accept the CPU's tensors. (What a kernel does when interpreted was settled at its import.)
    importlib.import_module("rush.kernels.support").INTERPRETED = True  # type: ignore[attr-defined]
    # Attention asks at each call which tiles it has: those of the GPU, not the interpreter's.
    tiles: Any = importlib.import_module("rush.kernels.flash_attention.tiles")
    tiles.support = SimpleNamespace(INTERPRETED=False)

    launched: dict[str, JITFunction] = {}
    name = ""

    def note(fn: Any, **_: Any) -> bool:
        launched[full_name(fn.jit_function)] = fn.jit_function
        return name in options.note  # true: do not compile

    knobs.runtime.jit_cache_hook = note
    report: dict[str, Any] = {"triton": triton.__version__, "compiled": [], "errors": {}, "seconds": {}}
    seen: set[int] = set()
    for name, launch in module.LAUNCHES.items():
        if options.only and name not in [*options.only, *options.note]:
            continue
        start = time.perf_counter()
        try:
            launch()
        except Exception as error:
            traceback.print_exc()
            causes = [error]
            while causes[-1].__cause__ is not None:
                causes.append(causes[-1].__cause__)  # type: ignore[arg-type]
            report["errors"][name] = "\n".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        report["seconds"][name] = round(time.perf_counter() - start, 1)
        for function in launched.values():
            for kernel in function.device_caches[0][0].values():
                if id(kernel) not in seen:
                    seen.add(id(kernel))
                    report["compiled"].append({"launch": name, **describe(function, kernel)})
    report["launched"] = sorted(launched)
    report["forgotten"] = sorted(set(functions) - reached(list(launched.values())))
    options.report.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
