"""The exported model in transformers gives the logits that `rush` gives: how far apart are they at most?

python examples/from-nothing/same_logits.py RUN EXPORTED RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rush

QUESTION = "User:\nWhat does the word butterfly mean?<|endoftext|>\nAssistant:\n"


def main() -> None:
    run, exported, result = map(Path, sys.argv[1:])
    ours = rush.load_model(run).float().eval()
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(exported)(QUESTION, return_tensors="pt").input_ids
    with torch.no_grad():
        mine, other = ours(tokens), theirs(tokens).logits
    answer = theirs.generate(tokens, max_new_tokens=60, do_sample=False)
    said = AutoTokenizer.from_pretrained(exported).decode(
        answer[0, tokens.shape[1] :], skip_special_tokens=True
    )
    difference = (mine - other).abs().max().item()
    record = {
        "largest_difference": difference,
        "largest_logit": other.abs().max().item(),
        "transformers_says": said,
    }
    result.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(f"{record}\n")
    sys.exit(difference > 1e-3 * record["largest_logit"])


if __name__ == "__main__":
    main()
