"""Techniques about the host: compiling, CUDA graphs, garbage collection, loading."""
