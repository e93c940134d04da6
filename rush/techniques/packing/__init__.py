"""Techniques that lay out documents in rows."""
