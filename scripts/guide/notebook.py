"""The guide's notebook: its cells executed, and what they show written into it.

No Jupyter is needed: a cell's last expression is shown by its `_repr_html_`, as a notebook would, and printed text is kept.
"""

from __future__ import annotations

import ast
import contextlib
import io
from typing import Any

from scripts.guide.book import ROOT

NOTEBOOK = ROOT / "examples" / "guide.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs that its cells have now, run from the folder of the project."""
    names: dict[str, Any] = {}
    cells, count = [], 0
    with contextlib.chdir(ROOT):
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                cells.append(cell)
                continue
            count += 1
            outputs = _outputs("".join(cell["source"]), names, count)
            cells.append({**cell, "execution_count": count, "outputs": outputs})
    return {**notebook, "cells": cells}


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body[-1]
    shown = last.value if isinstance(last, ast.Expr) else None
    if shown is not None:
        tree.body.pop()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = None if shown is None else eval(compile(ast.Expression(shown), "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(
            {"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}
        )
    if value is not None:
        show = getattr(value, "_repr_html_", None)
        data = {"text/html": show().splitlines(keepends=True)} if show else {"text/plain": [repr(value)]}
        outputs.append(
            {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs
