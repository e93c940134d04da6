"""Memory of a device and of a process: what counts as used, and what does not."""

from __future__ import annotations

import errno
import platform

import pytest
import torch

from rush.hardware.memory_use import graph_pool_bytes, out_of_memory, process_memory, trim_heap


def test_the_pools_of_captured_graphs_count_beyond_their_allocations() -> None:
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 400},
        {"segment_pool_id": (0, 1), "total_size": 500, "allocated_size": 20},
        {"segment_pool_id": (3, 0), "total_size": 70, "allocated_size": 70},
        {"total_size": 9, "allocated_size": 0},
    ]
    assert graph_pool_bytes(segments) == 480
    assert graph_pool_bytes([]) == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_library_without_memory_for_its_workspace_is_out_of_memory(error: BaseException) -> None:
    assert out_of_memory(error)


def test_another_error_of_a_library_is_not_out_of_memory() -> None:
    assert not out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
    assert not out_of_memory(ValueError("CUBLAS_STATUS_ALLOC_FAILED"))


def test_a_file_that_cannot_be_mapped_for_want_of_memory_is_out_of_memory() -> None:
    assert out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not out_of_memory(OSError(errno.ENOSPC, "No space left on device"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library has no call for it")
def test_freed_heap_memory_can_be_returned_to_the_system() -> None:
    """Pieces that are too small for a place of their own stay resident when they are freed beside others that are not."""
    pieces = [b"x" * 60_000 for _ in range(2000)]  # zeros would not be resident before they are read
    kept = pieces[::50]
    full = process_memory().resident_bytes
    del pieces
    trim_heap()
    assert process_memory().resident_bytes < full - 90e6
    assert len(kept) == 40
