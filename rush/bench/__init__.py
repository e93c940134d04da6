"""`rush bench`: our recipes against common baselines, and our kernels against other libraries'."""
