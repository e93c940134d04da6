"""Hand-written kernels, one folder each: the reference in plain torch, the Triton kernel, the public function.

They are written to be read, and benchmarked against the best baselines. Each runs on a CUDA device, and in Triton's
interpreter on a CPU (`TRITON_INTERPRET=1`), slowly, for tests. Some have C++ kernels for CPUs as well (`cpu/`), which
need no Triton.
"""
