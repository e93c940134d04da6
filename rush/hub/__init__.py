"""Hugging Face folders: config, weights, tokenizers, PEFT adapters, merging, export and offloaded inference."""
