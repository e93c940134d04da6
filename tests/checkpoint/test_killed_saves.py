"""SIGKILL inside a save: what was committed is always there, and always whole.

A child process imports torch once and then forks a victim for every round of all scenarios. The victim saves checkpoints
whose every number is their step, and kills itself with SIGKILL at the n-th operation on the file system
(opening, creating, renaming, deleting: Python announces each to an audit hook), or is killed from outside
after a delay. So the kills hit every gap between two operations, and moments inside a write.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

Rounds = dict[str, list[dict[str, Any]]]
VICTIMS = r'''
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn

from rush.records.checkpoint_store import CheckpointStore
from rush.checkpoint import restore as checkpoint

torch.set_num_threads(1)
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


def state(step):
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(step))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, -float(step)),
                "exp_avg_sq": torch.full_like(parameter, 2.0 * step),
            }
    return model, optimizer


def save(store, step):
    checkpoint.save(store, step, *state(step), {"position": step * 100}, {"val_loss": 1.0 / step})


def die_at(operation):
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event in EVENTS:
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def victim(store, report, operation):
    if operation:
        die_at(operation)
    if scenario == "replace":
        save(store, 2)
        os.write(report, b"2\n")
    else:
        for step in (3, 4) if scenario == "operations" else range(3, 1000):
            save(store, step)
            os.write(report, f"{step}\n".encode())
            store.retain(1, committed=step)


def round_of(number, operation, delay):
    """One life: what the victim had reported as saved, and what is found afterwards."""
    store = CheckpointStore(root / str(number))
    for step in (1, 2):
        save(store, step)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        victim(store, writer, operation)
        os._exit(0)
    os.close(writer)
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    reported = os.read(reader, 60_000).decode().split()
    os.close(reader)
    left = sorted(path.name for path in store.folder.iterdir() if path.name.startswith("."))
    damaged = []
    store.clean()
    good = store.newest_good(lambda path, problem: damaged.append(problem))
    model, optimizer = state(99)
    extra = checkpoint.load(good, model, optimizer)
    expected_model, expected_optimizer = state(good.step)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), expected_model.parameters()))
    for a, b in zip(model.parameters(), expected_model.parameters()):
        x, y = optimizer.state[a], expected_optimizer.state[b]
        same &= x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x)
    again = good.step + 1
    save(store, again)
    return {
        "killed": os.WIFSIGNALED(status), "reported": int(reported[-1]) if reported else 2, "step": good.step,
        "same": bool(same) and extra == {"position": good.step * 100}, "damaged": damaged, "left": left,
        "clean": all(not path.name.startswith(".") for path in store.folder.iterdir()),
    }


def after_delays():
    times = []
    for step in range(1, 6):
        began = time.perf_counter()
        save(CheckpointStore(root / "warm"), step)
        times.append(time.perf_counter() - began)
    span = 3 * sorted(times)[2]
    for number in range(15):
        yield round_of(number, 0, span * number / 15)


def at_operations():
    number, killed = 0, True
    while killed:
        number += 1
        yield (result := round_of(number, number, None))
        killed = result["killed"]


for scenario in ("operations", "replace", "delays"):
    root = Path(sys.argv[1]) / scenario
    width, lives = (512, after_delays) if scenario == "delays" else (8, at_operations)
    print(json.dumps([scenario, list(lives())]), flush=True)
'''


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    command = [sys.executable, "-c", VICTIMS, str(tmp_path_factory.mktemp("rounds"))]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert child.returncode == 0, child.stderr
    return dict(json.loads(line) for line in child.stdout.splitlines())


def check(results: list[dict[str, Any]]) -> None:
    for number, result in enumerate(results, start=1):
        assert result["damaged"] == [], f"round {number}"
        assert result["same"], f"round {number}: what is found is not what was saved"
        assert result["step"] >= result["reported"], f"round {number}: a committed checkpoint is gone"
        assert result["clean"], f"round {number}"


def test_killed_at_every_file_operation_of_save_and_retention_the_newest_is_whole(rounds: Rounds) -> None:
    results = rounds["operations"]
    check(results)
    assert len(results) >= 25
    assert [result["killed"] for result in results] == [True] * (len(results) - 1) + [False]
    assert {result["step"] for result in results} == {2, 3, 4}
    # The kills did hit the inside of saves and of deletions, not only the moments between them.
    litter = {name.split("-")[0] for result in results for name in result["left"]}
    assert litter == {".writing", ".deleted"}


def test_killed_at_every_file_operation_of_replacing_a_step_one_of_the_two_is_there(rounds: Rounds) -> None:
    results = rounds["replace"]
    check(results)
    assert {result["step"] for result in results} == {2}
    assert any(".replaced-step-000002" in result["left"] for result in results)


def test_killed_after_any_delay_the_newest_is_whole(rounds: Rounds) -> None:
    results = rounds["delays"]
    check(results)
    assert len(results) == 15
    assert all(result["killed"] for result in results)
