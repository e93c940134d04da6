"""Write docs/guide: the guide "From naive to fast", in English and in Russian, with its pictures: `python scripts/guide_page.py`.

The text is in scripts/guide/templates; every figure in it is a question to a record under results/ (scripts/guide/book.py).
What the planner says for an A100 is computed first and recorded in docs/guide/records/plan.json; `--keep-plan` leaves that
record as it is. The cells of examples/guide.ipynb are executed, and what they show is written into it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rush.files import write_atomic, write_json_atomic  # noqa: E402
from scripts.guide.book import plain  # noqa: E402
from scripts.guide.notebook import NOTEBOOK, executed  # noqa: E402
from scripts.guide.pages import files  # noqa: E402
from scripts.guide.plans import RECORD, planned  # noqa: E402

GUIDE = ROOT / "docs" / "guide"


def main() -> None:
    (GUIDE / "pictures").mkdir(parents=True, exist_ok=True)
    if "--keep-plan" not in sys.argv[1:]:
        (ROOT / RECORD).parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(ROOT / RECORD, planned())
    for name, text in files().items():
        write_atomic(GUIDE / name, plain(text))
    told = executed(json.loads(NOTEBOOK.read_text("utf-8")))
    write_atomic(NOTEBOOK, json.dumps(told, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
