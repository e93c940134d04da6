"""Techniques that change how the optimizer updates the weights."""
