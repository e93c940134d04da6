"""Hand-written kernels, a folder each: the plain definition, the Triton kernel, the public function.

They are written to be read, and measured against the best there is. Each runs on a CUDA device, and in
Triton's interpreter on the CPU (`TRITON_INTERPRET=1`), slowly, so that its tests run everywhere. Some have a
side in C++ for CPUs as well (`cpu/`); importing and using those there takes no Triton.
"""
