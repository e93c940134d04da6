"""Parallelism over ranks."""
