"""The reference of a preference run: computed once, kept, gone on with, refused when it is another's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rush.data import Batch
from rush.data.document_loader import DocumentLoader, document_validation
from rush.errors import DataError
from rush.hardware import probe
from rush.recipe_io import load_recipe
from rush.training import corpus
from rush.training.build import Run, build
from rush.training.objectives import Preference
from rush.training.objectives.preference import log_probabilities
from rush.training.reference import compute, reference_key, references, set_live_reference, wants_cached
from rush.training.step import train_step, validate
from tests.fresh_cache import fresh_cache
from tests.training.small_pairs import PairsInMemory

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # bf16 on older CPUs

SMALL = ["model.shape.num_layers=2", "model.shape.hidden=32", "model.shape.vocab_size=64", "model.shape.head_dim=8",
         "model.shape.intermediate=64", "batch.sequence=16", "batch.total_tokens=32", "batch.micro=2",
         "schedule.steps=50", "optimizer.lr=0.01", "objective.kind='dpo'"]  # fmt: skip


def make_run(*overrides: str) -> Run:
    return build(load_recipe("tiny", [*SMALL, *overrides]), probe("cpu"))


def one_by_one(run: Run, documents: PairsInMemory) -> list[float]:
    """Each answer alone in a row, from full logits in float64."""
    found = []
    with torch.no_grad():
        for index in range(len(documents)):
            tokens = torch.from_numpy(documents.tokens(index))
            logp = run.model(tokens[None, :-1]).double().log_softmax(-1)[0]
            found.append(float(sum(logp[t - 1, tokens[t]] for t in range(3, len(tokens)))))
    return found


def counting(run: Run, monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> list[int]:
    """Count the passes; stop as a power cut would."""
    calls: list[int] = []

    def counted(objective: Preference, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if stop_after is not None and len(calls) == stop_after:
            raise KeyboardInterrupt
        calls.append(1)
        return log_probabilities(model, batch)

    monkeypatch.setattr(Preference, "answers", counted)
    return calls


def test_the_numbers_are_those_of_each_answer_alone(tmp_path: Path) -> None:
    run, documents = make_run(), PairsInMemory(5)
    values = compute(run, documents, len(documents), tmp_path / "x.npy")
    assert values.tolist() == pytest.approx(one_by_one(run, documents), rel=1e-5)


def test_an_interrupted_pass_goes_on_and_a_finished_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, documents, path = make_run(), PairsInMemory(7), tmp_path / "x.npy"
    counting(run, monkeypatch, stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        compute(run, documents, len(documents), path)
    assert not path.exists()
    calls = counting(run, monkeypatch)
    values = compute(run, documents, len(documents), path)
    assert len(calls) == 2, "four micro batches in all, two of them done before"
    assert values.tolist() == pytest.approx(one_by_one(run, documents), rel=1e-5)
    calls = counting(run, monkeypatch)
    assert np.array_equal(compute(run, documents, len(documents), path), values)
    assert not calls
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def test_the_key_names_base_data_and_what_changes_the_rounding() -> None:
    run = make_run()
    keys = {reference_key(run, "data"), reference_key(make_run(), "data")}
    assert len(keys) == 1, "the same run has the same key"
    keys.add(reference_key(run, "other data"))
    keys.add(reference_key(make_run("run.seed=5"), "data"))
    keys.add(reference_key(make_run("techniques=['amp_bf16']"), "data"))
    assert len(keys) == 4
    assert reference_key(make_run("techniques=['lora']", "run.seed=5"), "data") not in keys
    beta = make_run("objective.beta=0.5", "optimizer.lr=0.5")
    assert reference_key(beta, "data") in keys, "what does not change the numbers does not make them anew"


@pytest.mark.parametrize(
    "techniques", ["[]", "['amp_bf16']", "['lora']", "['lora', 'amp_bf16', 'chunked_loss']"]
)
def test_a_run_with_cached_numbers_starts_at_exactly_log_two_in_any_order(
    tmp_path: Path, techniques: str
) -> None:
    run, documents = make_run(f"techniques={techniques}"), PairsInMemory(16)
    assert wants_cached(run)
    found = references(
        run,
        {"train": (documents, None), "validation": (documents, 2)},
        "d",
        tmp_path,
        resumed=False,
        cache=tmp_path,
    )
    assert found["validation"].shape == (4,)
    loader = DocumentLoader(documents, 2, 16, 2, seed=3, paired=True, references=found["train"])
    result = train_step(run, 1, 0.01, list(loader.next_step()))
    assert result.loss == float(torch.tensor(math.log(2), dtype=torch.float32))
    assert result.figures["accuracy"] == 0.5
    held_out = document_validation(documents, None, 2, 16, 2, paired=True, references=found["validation"])
    assert validate(run, held_out) != pytest.approx(math.log(2), abs=1e-4), "the reference followed the model"


def test_a_resumed_run_reads_its_own_numbers_whatever_its_weights_are_now(tmp_path: Path) -> None:
    documents = PairsInMemory(4)
    splits = {"train": (documents, None)}
    first = references(make_run(), splits, "d", tmp_path, resumed=False, cache=tmp_path / "cache")
    again = references(make_run("run.seed=99"), splits, "d", tmp_path, resumed=True, cache=tmp_path / "none")
    assert np.array_equal(first["train"], again["train"])
    assert not (tmp_path / "none").exists()


def missing(path: Path) -> None:
    path.unlink()


def shorter(path: Path) -> None:
    np.save(path, np.zeros(3, np.float32))


def pickled(path: Path) -> None:
    np.save(path, np.array([{}, 1], dtype=object), allow_pickle=True)


@pytest.mark.parametrize("spoil", [missing, shorter, pickled])
def test_numbers_that_are_not_this_runs_are_refused(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    splits = {"train": (PairsInMemory(4), None)}
    references(make_run(), splits, "d", tmp_path, resumed=False, cache=tmp_path / "cache")
    spoil(tmp_path / "reference" / "train.npy")
    with pytest.raises(DataError, match=r"train\.npy.*another --out"):
        references(make_run(), splits, "d", tmp_path, resumed=True, cache=tmp_path / "cache")


def test_weights_that_are_no_numbers_are_refused_by_the_pass(tmp_path: Path) -> None:
    run = make_run()
    with torch.no_grad():
        run.model.final_norm.weight.fill_(math.nan)
    with pytest.raises(DataError, match=r"gives pair 0 chosen a log-probability that is no finite number"):
        compute(run, PairsInMemory(2), 4, tmp_path / "x.npy")


def test_a_live_reference_is_a_frozen_copy_of_the_start_with_the_same_techniques() -> None:
    run = make_run("objective.reference='live'", "techniques=['chunked_loss', 'amp_bf16']")
    set_live_reference(run, None)
    assert isinstance(run.objective, Preference)
    copy = run.objective.reference_model
    assert copy is not None
    assert type(copy.loss_head) is type(run.model.loss_head)
    assert not any(p.requires_grad for p in copy.parameters())
    loader = DocumentLoader(PairsInMemory(8), 2, 16, 1, seed=3, paired=True)
    losses = [train_step(run, step, 0.01, list(loader.next_step())).loss for step in (1, 2)]
    assert losses[0] == float(torch.tensor(math.log(2), dtype=torch.float32))
    assert losses[1] != losses[0]
    plain = make_run("objective.reference='live'", "techniques=['lora']")
    set_live_reference(plain, None)
    assert isinstance(plain.objective, Preference)
    assert plain.objective.reference_model is None, "with adapters the base is there already"


def test_a_trial_asks_the_reference_about_the_pairs_it_reads_and_a_run_about_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    monkeypatch.setattr(corpus, "TRIAL_PAIRS", 4)
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = [
        "data.source=files", f"data.files=['{tmp_path / 'pairs.jsonl'}']", "data.format=preference", "data.template=plain",
        "data.tokenizer=train", "data.vocab_size=300", "model.shape.vocab_size=320", "batch.sequence=64",
        "batch.total_tokens=128", "data.validation=0.2",
    ]  # fmt: skip
    run = make_run(*data)
    opened = corpus.open_corpus(run.recipe, None, lambda text: None)
    trial, whole = opened.ready_for(run, None, None), opened.ready_for(run, None, tmp_path / "run")
    assert isinstance(trial, corpus.DocumentCorpus)
    assert isinstance(whole, corpus.DocumentCorpus)
    assert set(trial.references) == {"train"}
    assert len(trial.references["train"]) == 8
    assert len(whole.references["train"]) > 40
    assert len(whole.references["validation"]) > 0
    np.testing.assert_array_equal(trial.references["train"], whole.references["train"][:8])
    with trial.loader(run.recipe, run.loader_options) as loader:
        read = [batch for _ in range(6) for batch in loader.next_step()]
    assert all(
        torch.isin(batch.reference_b, torch.from_numpy(trial.references["train"])).all() for batch in read
    )  # type: ignore[arg-type]
