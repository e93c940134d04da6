"""Techniques for Optimization Rush, published as a package of their own."""
