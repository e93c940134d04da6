"""Techniques that choose number formats: tf32, bf16, fp16, fp8."""
