"""Packing and padding of documents."""
