"""Host overhead: compilation, CUDA graphs, garbage collection, data loading."""
