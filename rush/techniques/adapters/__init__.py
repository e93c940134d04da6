"""Adapters on a frozen base."""
