"""Number formats: TF32, bf16, fp16, fp8."""
