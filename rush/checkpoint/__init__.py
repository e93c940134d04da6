"""Checkpoints: the training state, its snapshot, writing, reading and restoring it, on one rank or many."""
