"""Optimizer updates."""
