"""The words follow the numbers: with made-up measurements that gain, do not gain or lose, they say so."""

from __future__ import annotations

import pytest

from rush.explain import find, topics, units
from tests.explain import made_up


def said(topic: str, data: made_up.Data) -> str:
    return " ".join(find(topic).words(data))


@pytest.mark.parametrize("name", sorted(made_up.EVERY))
def test_three_to_six_whole_sentences_and_all_numbers_in_the_table(name: str) -> None:
    topic = find(name)
    data = made_up.EVERY[name]()
    sentences = topic.words(data)
    assert 3 <= len(sentences) <= 6
    assert all(text[0].isupper() or text[0].isdigit() for text in sentences), sentences
    assert all(text.endswith(".") and "  " not in text for text in sentences), sentences
    assert sum(any(c.isdigit() for c in text) for text in sentences) >= 3
    table = topic.table(data)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert topic.picture(data)


def test_every_topic_has_made_up_data() -> None:
    assert set(made_up.EVERY) == set(topics())


def test_attention_gains_and_reports_by_how_much() -> None:
    text = said("attention", made_up.attention(gain=4.0))
    assert "flash is ×4.00" in text
    assert "faster" in text
    assert units.duration(64e-3) in text
    assert units.duration(16e-3) in text
    assert "quadratic" in text
    assert "(linear)" in text


def test_attention_without_a_gain_does_not_claim_one() -> None:
    text = said("attention", made_up.attention(gain=1.02))
    assert "no significant difference" in text
    assert "faster." not in text


def test_attention_that_loses_reports_slower() -> None:
    assert "flash is slower here" in said("attention", made_up.attention(gain=0.5))


def test_attention_reports_whether_the_limit_was_measured() -> None:
    extrapolated = said("attention", made_up.attention())
    # 2 GiB at 4096 tokens; ×4 per doubling: 8 GiB at 8192 fit into 16 GiB, 32 GiB at 16384 do not.
    assert "Extrapolated, not measured" in extrapolated
    assert "at 16\u202f384 tokens" in extrapolated
    assert units.size(32 * 2**30) in extrapolated
    measured = said("attention", made_up.attention(oom=True))
    assert "Measured: plain runs out" in measured
    assert "at 4096 tokens" in measured
    assert "xtrapolated" not in measured


def test_attention_that_saves_no_memory_reports_so() -> None:
    text = said("attention", made_up.attention(saves=False))
    assert "no saving" in text
    assert "linear" not in text.replace("between linear", "")


def test_attention_that_cannot_run_gives_the_reason() -> None:
    data = made_up.attention()
    broken = {"way": "flash", "length": 512, "status": "unsupported", "why": "no such kernel", "seconds": None, "peak_bytes": None}  # fmt: skip
    data["rows"] = [row for row in data["rows"] if row["way"] == "plain"] + [broken]
    assert "could not be measured here: no such kernel" in said("attention", data)
    assert find("attention").picture(data)


def test_memory_finds_the_steps_or_reports_that_there_are_none() -> None:
    text = said("memory", made_up.memory())
    assert units.duration(1.5e-9) in text
    assert units.duration(110e-9) in text
    assert "×73.3 longer" in text
    assert f"{units.size(2**16)} and {units.size(2**17)} (×3.33)" in text
    flat = said("memory", made_up.memory(hierarchy=False))
    assert "no hierarchy shows" in flat
    assert "climbs" not in flat
    assert "hardly less than at best" in flat


def test_memory_without_a_compiler_reports_what_is_missing_and_why() -> None:
    text = said("memory", made_up.memory(compiler=False))
    assert "Latency was not measured: no C compiler" in text
    assert "visit" not in text


def test_memory_compares_the_link_with_the_device() -> None:
    text = said("memory", made_up.memory(kind="cuda"))
    assert units.bandwidth(50e9) in text
    assert "as fast as the device's own memory" in text  # 50 GB/s against a made-up 12
    assert units.duration(9e-6) in text


def test_fusion_gains_as_the_bytes_do_or_reports_that_it_does_not() -> None:
    gain = said("fusion", made_up.fusion(gain=8.0))
    assert "×8.00" in gain
    assert "the time follows the bytes" in gain
    assert f"The bytes fell by ×8.00, to {units.size(2**27)}" in gain
    none = said("fusion", made_up.fusion(gain=1.0, sliced=False))
    assert "no gain beyond noise" in none
    assert "but the time did not" in none
    assert "less than the bytes" in said("fusion", made_up.fusion(gain=3.0))
    assert "the time follows the bytes" not in none
    assert "slower" in said("fusion", made_up.fusion(gain=0.5))


def test_fusion_without_a_compiler_uses_the_slices_and_gives_the_reason() -> None:
    text = said("fusion", made_up.fusion(compiled=False))
    assert "in slices that fit into the cache" in text
    assert "torch.compile failed here" in text
    nothing = said("fusion", made_up.fusion(compiled=False, sliced=False))
    assert nothing.startswith("Nothing could be fused here: torch.compile failed")


def test_batch_reports_from_where_to_where_it_is_free() -> None:
    text = said("batch", made_up.batch())
    # Weights at 20 GB/s take as long as 7 rows at 70 GFLOP/s: 8 rows are the last within 1.5 times.
    assert "From 1 row to 8 rows the time grows by" in text
    assert "memory is the limit" in text
    assert "the two roofs meet at about 7 rows" in text
    flat = said("batch", made_up.batch(memory_bound=False))
    assert "no difference that is worth the name" in flat
    assert "Nothing is free here" in flat
    data = made_up.batch()
    data["rows"][0]["seconds"] = made_up.took(1e-3)  # a kernel of its own for a single row
    assert "From 2 rows to 8 rows" in said("batch", data)
    assert "another kernel, made for it" in said("batch", data)
    assert "because the time goes into fetching weights" in said("batch", data)
    slow = {**data, "read_bytes_per_s": 60e9}
    assert "because the time goes into fetching weights" not in said("batch", slow)


def test_roofline_names_what_memory_bounds_and_explains_what_is_above() -> None:
    text = said("roofline", made_up.roofline())
    assert "norm and optimizer" in text
    assert "above the slope" not in text
    assert "×2.00 faster than the plain one" in text
    cached = said("roofline", made_up.roofline(cached=True, flash_gain=1.0))
    assert "Norm stands above the slope" in cached
    assert "as fast as the plain one" in cached


def test_precision_names_the_faster_format_or_reports_that_none_is() -> None:
    assert "bf16 buys the most speed" in said("precision", made_up.precision(half_gain=2.0))
    slow = said("precision", made_up.precision(half_gain=0.2))
    assert "no shorter format is faster on this device" in slow
    assert "for bf16 and fp16 this device, or torch on it, has no fast way" in slow
    assert "one number format only" in said("precision", made_up.precision(half_gain=None))


def test_precision_reports_where_sums_and_updates_are_lost() -> None:
    text = said("precision", made_up.precision())
    assert "256 in bf16" in text
    assert "2048 in fp16" in text
    assert "only fp32 gets there" in text


def test_occupancy_recommends_only_what_was_measured_to_pay() -> None:
    text = said("occupancy", made_up.occupancy())
    assert "the larger one is ×1.60" in text
    assert "one task more costs ×2.00" in text
    assert "it pays to pad the vocabulary and fill whole waves" in text
    none = said("occupancy", made_up.occupancy(padding=1.0, waves=False, workers=16))
    assert "makes no significant difference" in none
    assert "no step shows" in none
    assert "neither padding the vocabulary nor filling whole waves" in none
    assert "padding costs time" in said("occupancy", made_up.occupancy(padding=0.7))


def test_cpu_gpu_compares_one_chain_with_very_many() -> None:
    text = said("cpu-gpu", made_up.cpu_gpu())
    assert f"takes {units.duration(1e-9)} a step" in text
    # 8 scalar chains, 8 vectors of 8, and 256 on all cores, all at the same step.
    assert "8 chains that need nothing of each other reach ×8.00" in text
    assert "64 chains in vectors of 8 reach ×64.0, all 4 cores ×256" in text
    assert "a step takes ×4.00 as long as on the CPU" in text
    assert f"half of it takes {units.plain_number(2**17)} threads" in text
    # 1 µs + n / 1e9 against 5 µs + n / 4e11 cross near 4000, between 4^5 and 4^6.
    assert "from about 2048 numbers on the GPU is quicker" in text
    assert "Not measured" not in text


def test_cpu_gpu_explains_a_branch_by_its_wrong_guesses_only_where_there_are_some() -> None:
    text = said("cpu-gpu", made_up.cpu_gpu())
    assert f"which costs {units.duration(8e-9)} each time" in text
    assert "twice the arithmetic and ×20.0" in text
    none = said("cpu-gpu", made_up.cpu_gpu(guesses=False))
    assert "guess" not in none.replace("nothing is guessed", "")
    assert "the order makes little difference" in none


def test_cpu_gpu_reports_divergence_only_where_lanes_pay_for_it() -> None:
    assert "needs ×32.0" in said("cpu-gpu", made_up.cpu_gpu())
    assert "Whole warps on as many ways cost nothing" in said("cpu-gpu", made_up.cpu_gpu())
    assert "no divergence shows here" in said("cpu-gpu", made_up.cpu_gpu(diverges=False))


def test_cpu_gpu_reports_what_this_machine_cannot_measure() -> None:
    text = said("cpu-gpu", made_up.cpu_gpu(kind="cpu"))
    assert "Not measured, because torch finds no CUDA device" in text
    assert "On the GPU" not in text
    assert "one warp" not in text
    bare = said("cpu-gpu", made_up.cpu_gpu(kind="cpu", compiler=False))
    assert "were not measured: no C compiler" in bare
    assert find("cpu-gpu").picture(made_up.cpu_gpu(kind="cpu", compiler=False))


def test_links_finds_latency_and_bandwidth_and_extrapolates_by_them() -> None:
    text = said("links", made_up.links())
    assert "between 2 processes of this CPU (gloo over loopback)" in text
    assert f"that is {units.duration(100e-6)} and {units.bandwidth(1e9)}" in text
    assert f"below {units.size(100_000)} most of the time is latency" in text
    # GPT-2 has 124,439,808 parameters of 4 bytes.
    assert f"{units.duration(4 * 124_439_808 / 1e9)} for GPT-2 124M" in text
    assert "Copies between host and device were not measured" in text
    rate = 2**24 / (2e-6 + 2**24 / 8e9)
    assert f"flows at {units.bandwidth(rate)} for {units.size(2**24)}." in text
    assert "No latency shows" in said("links", made_up.links(latency_s=0.0))


def test_links_keeps_the_catalog_apart_from_what_was_measured() -> None:
    data = made_up.links()
    (catalog,) = [sentence for sentence in find("links").words(data) if "450" in sentence]
    assert catalog.startswith("By the catalog, not measured here")
    sources = {row[3] for row in find("links").table(data).rows if "NVLink" in row[0] or "Ethernet" in row[0]}
    assert "measured" not in sources
    assert all("not measured here" in panel.title for panel in find("links").picture(data)[2:])


def test_links_hides_an_all_reduce_behind_enough_tokens() -> None:
    # 2 · 7/8 · 4 bytes a parameter at 300 GB/s, 4 FLOPs a token and parameter at what an A100 reaches.
    data = made_up.links()
    tokens = 7 / 300e9 * data["backward"]["flops_per_s"] / 4
    assert tokens == pytest.approx(1420, rel=0.01)
    assert "1400 over NVLink 3" in said("links", data)


def test_links_on_gpus_reports_page_locked_memory_and_nccl() -> None:
    text = said("links", made_up.links(kind="cuda", gpus=4))
    assert "between 4 GPUs (NCCL)" in text
    assert f"from host to device {units.bandwidth(50e9)} (×5.00 as fast from page-locked" in text
    assert "not measured: this is a CPU" not in text
    assert "they need two, and there is one" not in text
    assert "they need two, and there is one" in said("links", made_up.links(kind="cuda", gpus=1))


def test_flash_attention_compares_the_orders_as_measured() -> None:
    text = said("flash-attention", made_up.flash_attention())
    assert "The first is ×1.50" in text
    assert "faster than plain, the second ×1.33" in text
    same = said("flash-attention", made_up.flash_attention(first=1.0, second=1.0))
    assert "The first is not significantly faster than plain" in same
    assert "slower than plain" in said("flash-attention", made_up.flash_attention(first=0.5))


def test_flash_attention_reports_who_shares_a_head() -> None:
    text = said("flash-attention", made_up.flash_attention())
    assert "With one head of 2048 tokens and 132 multiprocessors the second order is ×132" in text
    assert "with 528 heads no faster" in text
    assert "keeps a head on one of them" in text
    assert "makes no difference" in said("flash-attention", made_up.flash_attention(shares=False))


def test_flash_attention_finds_where_linformer_wins_or_that_it_never_does() -> None:
    # (n / 512)² against 6 · n / 512: equal at 3072, between the measured 2048 and 4096.
    text = said("flash-attention", made_up.flash_attention())
    assert "it wins from about 2900 tokens" in text
    assert "they are equal at 1024" in text
    assert "exact attention is faster at every length" in said(
        "flash-attention", made_up.flash_attention(crosses=False)
    )
    # 2 · n · h of 24 · h² + 2 · n · h: 1024 of 12 · 768 + 1024.
    assert f"{units.share(1024 / (12 * 768 + 1024))} for GPT-2 124M" in text


def test_flash_attention_without_a_compiler_still_judges_linformer() -> None:
    data = made_up.flash_attention(kind="cpu", compiler=False)
    assert "The three orders were not measured: no C compiler" in said("flash-attention", data)
    assert len(find("flash-attention").picture(data)) == 1


@pytest.mark.parametrize("name", sorted(made_up.EVERY))
def test_with_other_timings_every_topic_writes_other_sentences(name: str) -> None:
    slower = _scaled(made_up.EVERY[name](), 3.7)
    assert find(name).words(slower) != find(name).words(made_up.EVERY[name]())


def _scaled(value: object, factor: float) -> object:
    """Every timing multiplied."""
    if isinstance(value, dict):
        return {key: [s * factor for s in part] if key in ("samples", "seconds") and isinstance(part, list)
                else part * factor if key in ("median", "low", "high") else _scaled(part, factor)
                for key, part in value.items()}  # fmt: skip
    return [_scaled(part, factor) for part in value] if isinstance(value, list) else value
