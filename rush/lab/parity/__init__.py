"""Parity: the trace of a few steps, and the verdict on it against plain fp32."""
