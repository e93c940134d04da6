"""Less memory for more time: recomputation, offloading, accumulation."""
