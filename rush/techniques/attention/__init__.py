"""Techniques that replace the attention core."""
