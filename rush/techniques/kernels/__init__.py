"""Techniques that replace parts of the model by fused kernels."""
