"""Hugging Face folders in and out: config, weights, tokenizers, PEFT adapters, merging, and weights streamed from disk."""
