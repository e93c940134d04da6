"""`rush bench`: our recipes beside the baselines people use, and our kernels beside other libraries'."""
