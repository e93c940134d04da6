"""Memory in use, peak and free.

On CUDA from the caching allocator. On a CPU it is the resident memory of the whole process, Python and libraries included, so
differences mean more than the absolute value.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.errors import text_of
from rush.launched import launched

MUCH_FRAGMENTATION = 0.05
"""Fraction of the reserved memory lost to fragmentation that is worth a hint."""


@dataclass(frozen=True)
class ProcessMemory:
    resident_bytes: int
    peak_resident_bytes: int


def process_memory() -> ProcessMemory:
    """Resident memory of this process, now and at its peak."""
    if platform.system() == "Linux":
        # The kernel's own high-water mark; unlike getrusage's it is not inherited from the parent.
        return ProcessMemory(_status("VmRSS"), _status("VmHWM"))
    asked = ["ps", "-o", "rss=", "-p", str(os.getpid())]
    resident = int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) * 1024
    # macOS counts this one in bytes, the other systems in KiB.
    unit = 1 if platform.system() == "Darwin" else 1024
    return ProcessMemory(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _status(key: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[key].split()[0]) * 1024


@dataclass
class MemoryLimit:
    """On a CPU: the resident memory that a run may have.

    It is checked afterwards. A limit that makes allocations fail (ulimit) would end the process inside of some library.
    """

    limit_bytes: float
    transient_bytes: float = 0.0
    """The largest increase of resident memory inside of `held`."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise MemoryError if the block exceeded the limit."""
        reset_peak_memory("cpu")
        before = process_memory().resident_bytes
        yield
        peak = process_memory().peak_resident_bytes
        self.transient_bytes = max(self.transient_bytes, peak - before)
        if peak > self.limit_bytes:
            raise MemoryError(f"{peak:,} bytes were resident, {self.limit_bytes:,.0f} allowed")

    @property
    def room_bytes(self) -> float:
        """Memory that may be kept in addition, so that the next block stays within the limit."""
        return self.limit_bytes - process_memory().resident_bytes - self.transient_bytes


def trim_heap() -> None:
    """Return freed heap memory to the system (malloc_trim), which would count as resident."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_cached(device: str) -> None:
    """Free cached memory: cached blocks of a GPU, freed pages of this process."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
    trim_heap()


def free_host_memory() -> float:
    """Free host memory in bytes, divided by the ranks of this machine."""
    return free_memory("cpu") / launched("LOCAL_WORLD_SIZE", 1)


def free_memory(device: str) -> int:
    """Bytes that this process can still allocate, on CUDA or within the machine's, the container's and ulimit's limits."""
    if device.startswith("cuda"):
        import torch

        reserved = torch.cuda.memory_reserved()
        free, whole = torch.cuda.mem_get_info()
        # A process may be limited to a fraction of the GPU.
        left = torch.cuda.get_per_process_memory_fraction() * whole - reserved
        return max(0, int(min(free, left))) + reserved - torch.cuda.memory_allocated()
    import psutil  # type: ignore[import-untyped]

    found = [int(psutil.virtual_memory().available)]
    if platform.system() == "Linux":
        found += [
            limit - _status(used)
            for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
            if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
        ]
    container, files = Path("/sys/fs/cgroup"), {}
    for name in ("memory.max", "memory.current", "memory.stat"):
        if (container / name).is_file():
            files[name] = (container / name).read_text().strip()
    if len(files) == 3 and files["memory.max"].isdigit():
        # The page cache is freed on demand.
        stat = dict(line.split(" ", 1) for line in files["memory.stat"].splitlines())
        used = int(files["memory.current"]) - int(stat.get("inactive_file", 0))
        found.append(int(files["memory.max"]) - used)
    return max(0, min(found))


CUDA_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation, the `error_code` of torch's AcceleratorError."""
_NO_MEMORY = (
    "can't allocate memory", "not enough memory", "bad_alloc", "bad allocation", "out of memory",
    # cuBLAS takes its workspace when its handle is made, which may be at any matmul; cuDNN likewise.
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or a CPU."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # An allocation of the driver's own, outside torch's allocator: a context, a library's workspace.
    if getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # a file could not be mapped, a process not be started
    return isinstance(error, RuntimeError) and any(word in text_of(error) for word in _NO_MEMORY)


_GIB = {"GiB": 1.0, "MiB": 2**-10, "KiB": 2**-20, "bytes": 2**-30}
_IN_USE = re.compile(r"([\d.]+) (\w+) is allocated by PyTorch")
_UNUSED = re.compile(r"([\d.]+) (\w+) is reserved by PyTorch but unallocated")


def fragmentation_hint(error: BaseException) -> str:
    """A hint on fragmentation from an out-of-memory error, where that was much."""
    found = [pattern.search(str(error)) for pattern in (_IN_USE, _UNUSED)]
    used, unused = (float(each[1]) * _GIB.get(each[2], 0.0) if each else 0.0 for each in found)
    if unused < MUCH_FRAGMENTATION * (used + unused) or not unused:
        return ""
    return (
        f", with {unused:.1f} of {used + unused:.1f} GiB lost to fragmentation (the technique expandable_segments "
        "avoids it)"
    )


def memory_in_use(device: str) -> int:
    """Bytes in use now: reserved on CUDA (cached blocks included), resident elsewhere."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.memory_reserved(torch.device(device))
    return process_memory().resident_bytes


def peak_memory_bytes(device: str) -> int:
    """Peak bytes since the last reset: allocated on CUDA, resident elsewhere."""
    if device.startswith("cuda"):
        import torch

        kept = graph_pool_bytes(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated(torch.device(device)) + kept
    return process_memory().peak_resident_bytes


def graph_pool_bytes(segments: Iterable[Mapping[str, Any]]) -> int:
    """Memory of captured CUDA graphs that is not counted as allocated, from the allocator's snapshot.

    A replay allocates nothing: its tensors live in the graph's private pool. The allocator counts that memory as free, but no
    other tensor can use it.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )


def reset_peak_memory(device: str) -> None:
    """Reset the peak. Only Linux can do that for a process; elsewhere the peak since the start stays."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(torch.device(device))
    elif platform.system() == "Linux":
        Path("/proc/self/clear_refs").write_text("5")
