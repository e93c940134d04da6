"""Fused kernels in place of modules of the model."""
