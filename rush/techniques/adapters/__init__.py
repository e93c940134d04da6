"""Techniques that train adapters beside frozen weights."""
