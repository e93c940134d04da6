"""Techniques that trade time for memory: recomputation, offloading, accumulation."""
