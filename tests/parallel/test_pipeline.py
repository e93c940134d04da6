"""A model in stages learns what it learns in one piece: every schedule, tied and untied heads, beside copies and shards."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rush.errors import MachineError, RecipeError
from rush.hardware import probe
from rush.models import build_model, shape_of
from rush.models.pipeline_stages import keep, split
from rush.parallel.pipeline import SCHEDULES, Pipeline, bubble_fraction
from rush.recipe_io import load_recipe
from rush.techniques import check
from rush.training.loop import train_recipe
from tests.fresh_cache import fresh_cache
from tests.parallel import test_sameness
from tests.parallel.rank_work import Result, learn, meet_trouble, on_ranks, recipe
from tests.parallel.test_sameness import furthest
from tests.training.small_runs import rows, rush, small_recipe, write_corpus

FOUR = ("model.shape.num_layers=4",)
LAYOUTS: dict[str, tuple[dict[str, int], tuple[str, ...], tuple[str, ...]]] = {
    "pp 2": ({"pp": 2}, (), ()),
    "pp 2, gpipe": ({"pp": 2}, ("{name='pp', schedule='gpipe'}",), ()),
    "pp 2, interleaved": ({"pp": 2}, ("{name='pp', schedule='interleaved'}",), FOUR),
    "pp 2, zero bubble": ({"pp": 2}, ("{name='pp', schedule='zero_bubble'}",), FOUR),
    "pp 2, zero bubble, two stages": ({"pp": 2}, ("{name='pp', schedule='zero_bubble', stages=2}",), FOUR),
    "pp 2, zbv": ({"pp": 2}, ("{name='pp', schedule='zbv'}",), FOUR),
    "pp 2, by parameters, fused": ({"pp": 2}, ("{name='pp', balance='parameters'}", "fused_adamw"), FOUR),
    "pp 2, micro batches of unequal length": ({"pp": 2}, ("pad",), ()),
    "pp 4": ({"pp": 4}, (), FOUR),
    "pp 2 × ddp 2": ({"pp": 2, "ddp": 2}, (), ()),
    "pp 2 × ddp 2, interleaved": ({"pp": 2, "ddp": 2}, ("{name='pp', schedule='interleaved'}",), FOUR),
    "pp 2 × ddp 2, zero bubble": ({"pp": 2, "ddp": 2}, ("{name='pp', schedule='zero_bubble'}",), FOUR),
    "pp 2 × fsdp 2": ({"pp": 2, "fsdp": 2}, (), ()),
    "pp 2 × fsdp 2, ZeRO-1": ({"pp": 2, "fsdp": 2}, ("{name='fsdp', stage='optimizer'}",), ()),
    "pp 2 × fsdp 2, interleaved": ({"pp": 2, "fsdp": 2}, ("{name='pp', schedule='interleaved'}",), FOUR),
    "pp 2 × fsdp 2, zero bubble": (
        {"pp": 2, "fsdp": 2},
        ("{name='pp', schedule='zero_bubble'}", "{name='fsdp', stage='optimizer'}"),
        FOUR,
    ),
    "pp 2 × fsdp 2, zbv, untied": (
        {"pp": 2, "fsdp": 2},
        ("{name='pp', schedule='zbv'}", "{name='fsdp', stage='optimizer'}"),
        (*FOUR, "model.shape.tied_head=false", "batch.total_tokens=256"),
    ),
    "pp 2 × cp 2": ({"pp": 2, "cp": 2}, (), ()),
    "pp 2 × tp 2": ({"pp": 2, "tp": 2}, (), ()),
    "pp 2 × tp 2, whole stream": ({"pp": 2, "tp": 2}, ("{name='tp', sequence=false}",), ()),
    "pp 2 × fsdp 2 × tp 2": ({"pp": 2, "fsdp": 2, "tp": 2}, (), ()),
    "pp 2 × fsdp 2 × cp 2": ({"pp": 2, "fsdp": 2, "cp": 2}, (), ()),
}
QUICK: dict[str, set[str]] = {"gpt2": {"pp 2"}, "llama": set()}
CASES = [
    pytest.param(family, name, marks=[] if name in QUICK[family] else [pytest.mark.slow])
    for family in QUICK
    for name in LAYOUTS
]
ONE_END, TWICE = "a tied embedding learns from one end only", "a stage's loss scale is applied twice"


@cache
def one_rank(family: str, techniques: tuple[str, ...], more: tuple[str, ...]) -> Result:
    if not (techniques or more):
        return test_sameness.one_rank(family, test_sameness.MORE_STEPS)
    found: Result = on_ranks(1, learn, family, {}, techniques, test_sameness.MORE_STEPS, "", more)[0]
    return found


@cache
def ranks(family: str, name: str) -> list[Result]:
    layout, techniques, more = LAYOUTS[name]
    return together(
        on_ranks(
            int(np.prod(list(layout.values()))),
            learn,
            family,
            layout,
            techniques,
            test_sameness.MORE_STEPS,
            "",
            more,
        )
    )


def together(found: list[Result]) -> list[Result]:
    """Each rank's gradients with those of the stages that other ranks hold."""
    whole = {name: value for ours in reversed(found) for name, value in ours["gradients"].items()}
    for ours in found:
        ours["held"] = set(ours["gradients"])
        ours["gradients"] = whole | ours["gradients"]
    return found


@pytest.mark.parametrize(("family", "name"), CASES)
def test_stages_learn_what_the_whole_model_learns(family: str, name: str) -> None:
    layout, techniques, more = LAYOUTS[name]
    plain = tuple(technique for technique in techniques if technique == "pad")
    found, reference = ranks(family, name), one_rank(family, plain, more)
    assert reference["losses"][-1] < 0.8 * reference["losses"][0], "nothing was learned"
    for rank, ours in enumerate(found):
        # Llama's step 16 is a sensitive one (`furthest`), and step 19 of the untied models: on one rank, too, flash_attention
        # moves its norm by 1e-3 (no earlier one by more than 2e-7).
        apart = furthest(ours, reference, reordered=family == "llama" or "untied" in name)
        assert max(apart.values()) < 1e-5, (rank, apart)
        assert ours["labels"] == reference["labels"]
        assert ours["losses"] == found[0]["losses"], "every rank reports the loss, though one stage knows it"
        assert ours["norms"] == found[0]["norms"]
        assert ours["held"] < reference["gradients"].keys(), "a rank holds some of the parameters"
    parts = int(np.prod([layout.get(axis, 1) for axis in ("ddp", "fsdp", "cp")]))
    assert len({tuple(ours["own_labels"]) for ours in found}) == parts
    tied = "embedding.weight"
    if family == "gpt2" and name == "pp 2":
        assert [tied in ours["held"] for ours in found] == [True, True], "the first stage and the last"
        first, last = (ours["gradients"][tied] for ours in found)
        assert first.tobytes() == last.tobytes(), "and both copies learn the same"


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_pipeline_takes_effect(family: str, name: str) -> None:
    layout, _, _ = LAYOUTS[name]
    for ours in ranks(family, name):
        proofs = ours["proofs"]
        assert proofs.keys() >= layout.keys()
        assert all(took_effect for took_effect, _ in proofs.values()), proofs
        assert "the bubble of schedule" in proofs["pp"][1]


@pytest.mark.parametrize("bug", [ONE_END, pytest.param(TWICE, marks=pytest.mark.slow)])
def test_a_planted_bug_is_seen(bug: str) -> None:
    planted = together(on_ranks(2, learn, "gpt2", {"pp": 2}, (), 5, bug))
    reference = on_ranks(1, learn, "gpt2", {}, (), 5)[0]
    for ours in planted:
        apart = furthest(ours, reference)
        assert apart["gradients"] > 1e-3, apart
        assert apart["losses"] > 1e-5, apart


def test_an_error_in_a_pipeline_is_raised_on_all_ranks() -> None:
    first, second = on_ranks(2, meet_trouble, {"pp": 2}, ("fused_adamw",))
    assert first["said"] == second["said"]
    fine, empty, diverged = first["said"]
    assert fine.startswith("loss 5.")
    assert diverged == "Diverged: step 3: the loss is nan"
    assert empty.startswith("DataError: step 2 has no label to learn from")
    assert first["weights"] == second["weights"], "the copies of the tied embedding stay equal"
    assert len(set(first["weights"])) == 1, "what is not finite changes nothing, on no rank"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "schedule", "technique"),
    [
        ("gpt2", "1f1b", "accumulate"),
        ("llama", "1f1b", "{name='compile', scope='block'}"),
        ("gpt2", "interleaved", "checkpoint_full"),
        ("gpt2", "1f1b", "checkpoint_selective"),
        ("llama", "1f1b", "flash_attention"),
        ("gpt2", "1f1b", "vocab_pad"),
        ("gpt2", "1f1b", "pack_best_fit"),
    ],
)
def test_a_technique_does_the_same_in_a_pipeline_as_on_one_rank(
    family: str, schedule: str, technique: str
) -> None:
    more = ("batch.micro=2", "batch.total_tokens=256", *(FOUR if schedule == "interleaved" else ()))
    reference = on_ranks(1, learn, family, {}, (technique,), 3, "", more)[0]
    pp = f"{{name='pp', schedule='{schedule}'}}"
    found = together(on_ranks(2, learn, family, {"pp": 2}, (technique, pp), 3, "", more))
    for ours in found:
        apart = furthest(ours, reference)
        assert max(apart.values()) < 1e-5, apart
        assert all(took_effect for took_effect, _ in ours["proofs"].values()), ours["proofs"]
    assert any(len(ours["proofs"]) == 2 for ours in found), (
        "what acts on the head is proved where the head is"
    )


@pytest.mark.parametrize(
    ("techniques", "changes", "kind", "said"),
    [
        ([], ["layout.pp=3"], RecipeError, r"takes 3 blocks, but \w+ has 2; layout.pp can be 1 to 2"),
        (
            [],
            ["layout.pp=2", "batch.total_tokens=32"],
            RecipeError,
            r"a step has 1 micro batches, .* 1f1b .* layout.pp=2; the nearest allowed: 2, 3, 4",
        ),
        (
            ["{name='pp', schedule='interleaved'}"],
            ["layout.pp=2", "batch.total_tokens=160", *FOUR],
            RecipeError,
            "a step has 5 micro batches, .* allowed: 3, 4, 6",
        ),
        (["{name='pp', stages=2}"], ["layout.pp=2"], RecipeError, "schedule 1f1b takes 1 on each rank"),
        (
            ["{name='pp', schedule='zbv', stages=3}"],
            ["layout.pp=2"],
            RecipeError,
            "schedule zbv takes 2 on each rank",
        ),
        (
            ["{name='pp', schedule='interleaved'}"],
            ["layout.pp=2"],
            RecipeError,
            "2 stages on each rank, which takes 4 blocks",
        ),
        (["pp"], [], MachineError, "set layout.pp to 2 or more"),
        (["compile"], ["layout.pp=2"], MachineError, "use compile with scope block"),
        (
            ["{name='fsdp', stage='gradients'}"],
            ["layout.pp=2", "layout.fsdp=2"],
            RecipeError,
            "allowed with it: parameters, optimizer",
        ),
        (
            ["{name='pp', schedule='zero_bubble'}"],
            ["layout.pp=2", "layout.fsdp=2"],
            RecipeError,
            "allowed with it: optimizer",
        ),
        (
            ["{name='pp', schedule='zbv'}", "{name='fsdp', stage='optimizer'}"],
            ["layout.pp=2", "layout.fsdp=2", *FOUR],
            RecipeError,
            "a tied embedding would be reduced twice",
        ),
        (
            ["{name='pp', schedule='zbv'}"],
            ["layout.pp=2", "layout.ddp=2", *FOUR],
            RecipeError,
            "a tied embedding would be reduced twice",
        ),
        (
            ["{name='ddp', send_once=false}"],
            ["layout.pp=2", "layout.ddp=2"],
            RecipeError,
            "the only allowed value is true",
        ),
    ],
)
def test_what_a_pipeline_cannot_be_is_refused_with_one_sentence(
    techniques: list[str], changes: list[str], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        check(recipe("gpt2", {}, techniques, *changes), probe("cpu"))
    assert "\n" not in str(caught.value)


def test_the_split_is_the_most_even_there_is() -> None:
    spans = split(shape_of("llama-3.2-1b"), 4, 2048)
    assert [(span.start, span.end) for span in spans] == [(0, 5), (5, 10), (10, 15), (15, 16)]
    assert all(0.24 < span.cost < 0.26 for span in spans), "the head is worth four blocks"
    held = split(shape_of("llama-3.2-1b"), 4, 2048, "parameters")
    assert [span.end - span.start for span in held] == [2, 6, 6, 2], (
        "the embedding weighs as much as the head"
    )
    assert abs(sum(span.cost for span in spans) - 1) < 1e-9


@pytest.mark.parametrize("name", ["tiny", "llama-3.1-8b"])
def test_ranks_hold_every_parameter_under_its_name(name: str) -> None:
    shape = shape_of(name)
    with torch.device("meta"):
        whole = dict(build_model(shape).named_parameters())
        parts = [build_model(shape) for _ in range(2)]
    modules = [keep(part, [span]) for part, span in zip(parts, split(shape, 2, 512), strict=True)]
    names = [dict(part.named_parameters()) for part in parts]
    assert names[0].keys() | names[1].keys() == whole.keys()
    both = names[0].keys() & names[1].keys()
    assert both == ({"embedding.weight"} if shape.tied_head else set())
    for part, held, (module,) in zip(parts, names, modules, strict=True):
        assert {id(p) for p in module.parameters()} == {id(p) for p in held.values()}
        assert [name for name in whole if part.holds(name)] == [name for name in whole if name in held]


def orders(name: str, ranks: int, micro_batches: int) -> dict[int, list[tuple[int, str]]]:
    if name == "gpipe":
        return {r: [(r, "F")] * micro_batches + [(r, "B")] * micro_batches for r in range(ranks)}
    ahead = [min(micro_batches, ranks - r) for r in range(ranks)]
    return {
        r: [(r, "F")] * n + [(r, "B"), (r, "F")] * (micro_batches - n) + [(r, "B")] * n
        for r, n in enumerate(ahead)
    }


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 4), (4, 4), (4, 16), (8, 38)])
def test_the_idle_share_is_the_papers(name: str, p: int, m: int) -> None:
    assert bubble_fraction(orders(name, p, m)) == pytest.approx((p - 1) / (m + p - 1))


def test_a_schedule_is_made_anew_only_when_micro_batches_outgrow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(Pipeline, "_build_schedule", lambda self, count, dims: made.append((count, dims)))
    group: Any = type("Group", (), {"size": lambda self: 2})()
    monkeypatch.setattr("rush.parallel.pipeline._comm_device", lambda group, device: device)
    pipeline = Pipeline(
        SCHEDULES["1f1b"], [], [], 2, group, torch.device("cpu"), 8, torch.float32, lambda *_: torch.zeros(())
    )
    for shapes in ([(1, 4)] * 2, [(1, 4)] * 2, [(1, 4), (1, 3)], [(1, 4)] * 2, [(1, 2)] * 2, [(2, 4)] * 2):
        pipeline._fit(shapes)
    assert made == [(2, (1, 4, 8)), (2, (4, 8)), (2, (8, 8))]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_pipeline_trains_saves_samples_and_resumes_on_one_rank(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, cache = tmp_path / "small.toml", tmp_path / "cache"
    recipe.write_text(
        small_recipe(
            write_corpus(tmp_path / "corpus"),
            family,
            schedule={"steps": 12, "warmup": 2},
            run={"save_every": 6},
        )
    )

    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(cache)))

    def train(out: str, pp: int, *words: str) -> None:
        if pp == 1:
            train_recipe(load_recipe(str(recipe)), tmp_path / out, resume="--resume" in words)
            return
        done = rush(
            "train", recipe, "layout.pp=2", "--nproc", "2", "--out", tmp_path / out, *words, cache=cache
        )
        assert done.returncode == 0, done.stderr

    def same(ours: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
        assert [row["step"] for row in ours] == [row["step"] for row in reference]
        for key in ("loss", "grad_norm", "tokens", "val_loss"):
            pairs = [
                (mine[key], theirs[key])
                for mine, theirs in zip(ours, reference, strict=True)
                if key in theirs
            ]
            gaps = [abs(mine - theirs) / theirs for mine, theirs in pairs]
            # One step of Llama's may be that sensitive to a rounding (`furthest`), but not the first.
            held = sorted(gaps[1:])[:-1] if (family, key) == ("llama", "grad_norm") else gaps[1:]
            assert max([gaps[0], *held]) < 1e-5, (key, gaps)

    train("one", 1)
    train("staged", 2)
    same(rows(tmp_path / "staged"), rows(tmp_path / "one"))
    texts = [rows(tmp_path / out, "samples.jsonl") for out in ("staged", "one")]
    assert texts[0] == texts[1]
    # One rank goes on from what two wrote, two from what one wrote, and both end where one rank would have.
    for out, pp in (("staged", 1), ("one", 2)):
        shutil.rmtree(tmp_path / out / "checkpoints" / "step-000012")
        train(out, pp, "--resume")
    same(rows(tmp_path / "staged"), rows(tmp_path / "one"))
    said = rush("generate", tmp_path / "one", "--prompt", "def ", "--max-tokens", "4", cache=cache)
    assert said.returncode == 0, said.stderr
