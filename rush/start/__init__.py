"""`rush start`: from a model and data to a recipe that fits a device and trains.

What is there is read (`model.py`, `data_files.py`, `inspect.py`), tried with tokenizer and template (`encoding.py`), decided by
small functions with their sources (`decisions.py`, `methods.py`, gathered in `drafting.py`), fitted to the memory of a device by
the planner (`fitting.py`) and written with the reasons (`recipe_text.py`).
"""

from __future__ import annotations

from rush.start.starting import Request, Started, start

__all__ = ["Request", "Started", "start"]
