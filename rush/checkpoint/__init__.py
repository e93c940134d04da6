"""Checkpoints: what a training state is, its snapshot, how it is written, read and restored, by one rank or many."""
