"""Evidence of a matmul dtype: matmuls in it, and none in another one beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rush.techniques.api.evidence import matmuls_took


@pytest.mark.parametrize(
    ("dtypes", "took"),
    [
        ({"bfloat16"}, True),
        ({"bfloat16", "float64"}, True),
        ({"float8_e4m3fn"}, True),
        ({"float8_e4m3fn", "bfloat16"}, True),
        ({"bfloat16", "float32"}, False),
        ({"bfloat16", "float16"}, False),
        ({"float8_e4m3fn", "float32"}, False),
        ({"float32"}, False),
        (set(), False),
    ],
)
def test_some_matmuls_in_a_dtype_are_not_all(dtypes: set[str], took: bool) -> None:
    seen: Any = SimpleNamespace(matmul_dtypes=dtypes)
    assert matmuls_took(seen, "bfloat16") is took
