"""Techniques that divide the work among ranks."""
