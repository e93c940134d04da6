"""Ladders: the file, the climb from rung to rung, the findings."""
