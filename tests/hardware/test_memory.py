"""Memory of a device: what a recorded graph holds counts, though the allocator calls it free."""

from __future__ import annotations

from rush.hardware.memory import recorded_bytes


def test_the_pools_of_recorded_graphs_count_beyond_what_is_allocated_in_them() -> None:
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 400},
        {"segment_pool_id": (0, 1), "total_size": 500, "allocated_size": 20},
        {"segment_pool_id": (3, 0), "total_size": 70, "allocated_size": 70},
        {"total_size": 9, "allocated_size": 0},
    ]
    assert recorded_bytes(segments) == 480
    assert recorded_bytes([]) == 0
