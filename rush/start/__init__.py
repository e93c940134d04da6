"""`rush start`: from a model and data to a recipe that fits a device and trains.

It reads the model and the data (`model.py`, `data_files.py`, `inspect.py`), encodes samples with tokenizer
and template (`encoding.py`), decides by small functions with their sources (`decisions.py`, `methods.py`,
combined in `drafting.py`), fits the recipe to the memory of a device with the planner (`fitting.py`), and
writes it with the reasons (`recipe_text.py`).
"""

from __future__ import annotations

from rush.start.starting import Request, Started, start

__all__ = ["Request", "Started", "start"]
