"""One contender of `rush bench offload` in a fresh process: python -m rush.bench.offload_process '{"contender": "rush", …}'

Both keep embedding, final norm and LM head on the device and load a layer's weights just before its forward;
both use a KV cache. rush generates as `rush generate --offload` does. accelerate's hooks run in a plain loop
over transformers' forward, one token at a time, so only the model is timed. On a CPU the "device" is the CPU
as well: a functional test without a meaningful speed.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_grad_enabled(False)
    contenders: dict[str, Callable[[dict[str, Any]], Iterator[int]]] = {
        "rush": _rush,
        "accelerate": _accelerate,
    }
    if case["contender"] == "accelerate":
        import_module("accelerate")
        import_module("transformers")
    device = case["device"]
    before = _host_bytes()
    start = time.perf_counter()
    made = contenders[case["contender"]](case)
    assert next(made) == -1  # loaded
    times = [time.perf_counter() - start]
    ids = []
    for token in made:
        ids.append(token)  # read back from the device, so the work is done
        times.append(time.perf_counter() - start)
    spans = [later - earlier for earlier, later in itertools.pairwise(times)]
    json.dump(
        {
            "load_s": times[0],
            "first_token_s": spans[0],
            "token_s": spans[1:],
            "device_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
            "host_bytes": _host_bytes(),
            "imports_bytes": before,
            "ids": ids,
        },
        sys.stdout,
    )


def _host_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _rush(case: dict[str, Any]) -> Iterator[int]:
    from rush.hub.folders import load_model
    from rush.sampling import generate

    dtype = getattr(torch, case["dtype"])
    model = load_model(case["folder"], device=case["device"], dtype=dtype, offload=case["where"])
    yield -1
    yield from generate(model, case["prompt"], max_new_tokens=case["new_tokens"], temperature=0.0)


def _accelerate(case: dict[str, Any]) -> Iterator[int]:
    cpu_offload = import_module("accelerate").cpu_offload
    loader: Any = import_module("transformers").AutoModelForCausalLM

    device, dtype = case["device"], getattr(torch, case["dtype"])
    resident = {
        "model.embed_tokens": device,
        "model.norm": device,
        "model.rotary_emb": device,
        "lm_head": device,
    }
    with tempfile.TemporaryDirectory() as folder:
        if case["where"] == "cpu" and device == "cpu":
            # A device map would leave everything where it is.
            model = loader.from_pretrained(case["folder"], dtype=dtype)
            for layer in model.model.layers:
                cpu_offload(layer, execution_device=torch.device("cpu"))
        else:
            places = {**resident, "model.layers": case["where"]}
            model = loader.from_pretrained(
                case["folder"], dtype=dtype, device_map=places, offload_folder=folder
            )
        model.eval()
        yield -1
        ids = torch.tensor([case["prompt"]], device=device)
        cache = None
        for _ in range(case["new_tokens"]):
            found = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, ids = found.past_key_values, found.logits[:, -1:].argmax(-1)
            yield int(ids.item())


if __name__ == "__main__":
    main()
