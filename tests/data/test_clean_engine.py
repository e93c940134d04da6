"""Cleaning on the engine: the same bytes whoever does the work, after a kill, and in little memory."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("datatrove")

from rush.data.clean import CleanProgress, clean, parse_pipeline, row_files
from rush.data.clean.workers import GRACE_S
from rush.errors import DataError, MachineError, RecipeError

ROOT = Path(__file__).parents[2]
STAGES = [
    {"kind": "words", "min": 3},
    {"kind": "exact_duplicates"},
    {"kind": "near_duplicates", "buckets": 4, "hashes_per_bucket": 4},
    {"kind": "rare_items", "field": "tags", "min_count": 3},
]
PIPELINE = parse_pipeline({"stage": STAGES})
SCRIPT = """
import json, sys
from rush.data.clean import clean, parse_pipeline, row_files, workers
row_files.MIN_UNIT_BYTES = 40_000
workers.GRACE_S = float(sys.argv[6])
if __name__ == "__main__":
    pipeline = parse_pipeline({"stage": json.loads(sys.argv[1])})
    clean(pipeline, [sys.argv[2]], sys.argv[3], executor=sys.argv[4], workers=int(sys.argv[5]))
"""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MIN_UNIT_BYTES", 40_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred rows with copies, near copies and rare tags, in several units."""
    chance = random.Random(5)
    words = [f"word{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    made: list[dict[str, Any]] = []
    for index in range(600):
        text = " ".join(chance.choices(words, k=chance.randint(1, 30)))
        tags = [f"t{int(chance.paretovariate(0.8))}" for _ in range(3)]
        made.append({"id": index, "text": text, "tags": tags})
        if index % 9 == 0:
            made.append({**chance.choice(made), "id": -index})
        if index % 11 == 0:
            old = chance.choice(made)
            made.append({**old, "id": -index, "text": old["text"] + " more"})
    path = tmp_path_factory.mktemp("source") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "MIN_UNIT_BYTES", 40_000)
        report = clean(PIPELINE, [str(source)], folder / "out.jsonl", workers=1)
    assert report is not None
    assert all(stage["removed"] > 0 for stage in report["stages"])
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def start(
    script: Path,
    source: Path,
    output: Path,
    executor: str = "local",
    workers: int = 1,
    grace_s: float = GRACE_S,
) -> subprocess.Popen[str]:
    """In a process of its own: the engines keep managers, loggers and daemons."""
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        str(script),
        json.dumps(STAGES),
        str(source),
        str(output),
        executor,
        str(workers),
        str(grace_s),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize(
    ("executor", "workers"), [("local", 2), pytest.param("ray", 2, marks=pytest.mark.slow)]
)
def test_any_number_of_workers_on_any_executor_gives_the_same_bytes(
    source: Path, expected: dict[str, bytes], tmp_path: Path, executor: str, workers: int
) -> None:
    (tmp_path / "out").mkdir()
    process = start(tmp_path / "script.py", source, tmp_path / "out" / "out.jsonl", executor, workers)
    _, said = process.communicate(timeout=280)
    assert process.returncode == 0, said[-3000:]
    assert contents(tmp_path / "out") == expected
    assert "PIPELINE" not in said  # the engine's own talk stays in its file


def family(session: int) -> list[int]:
    """What still lives of the processes that belong to a session."""
    alive = [process for process in psutil.process_iter() if process.status() != psutil.STATUS_ZOMBIE]
    return [process.pid for process in alive if os.getsid(process.pid) == session]


@pytest.mark.parametrize("after", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_killed_cleaning_leaves_no_output_and_resumes_to_the_same_bytes(
    source: Path, expected: dict[str, bytes], tmp_path: Path, after: int
) -> None:
    output = tmp_path / "out" / "out.jsonl"
    process = start(tmp_path / "script.py", source, output)
    working = output.with_name(".out.jsonl.cleaning")
    deadline = time.monotonic() + 60
    while len(list(working.glob("pipeline/*/completions/*"))) < after and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)  # not its children: they have to notice
    process.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while (left := family(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    assert [path.name for path in output.parent.iterdir()] == [working.name]
    done = {path: path.stat().st_mtime_ns for path in working.glob("pipeline/*/completions/*")}
    assert len(done) >= after
    reports: list[CleanProgress] = []
    again: set[Path] = set()

    def watch(now: CleanProgress) -> None:
        reports.append(now)
        again.update(path for path, when in done.items() if path.exists() and path.stat().st_mtime_ns != when)

    clean(PIPELINE, [str(source)], output, workers=1, progress=watch)
    assert reports[0].done >= len(done)
    assert reports[-1].done == reports[-1].total
    assert not again  # what was done is not done again
    assert contents(tmp_path / "out") == expected


@pytest.mark.slow
def test_what_another_pipeline_left_behind_is_not_used(
    source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    copy = tmp_path / "rows.jsonl"
    copy.write_bytes(source.read_bytes() + b"broken\n")
    (tmp_path / "out").mkdir()
    other = parse_pipeline({"stage": [{"kind": "words", "min": 20}, *STAGES[1:]]})
    with pytest.raises(DataError, match=r"rows\.jsonl:\d+: not valid JSON"):
        clean(other, [str(copy)], tmp_path / "out" / "out.jsonl", workers=1)
    assert list((tmp_path / "out").glob(".out.jsonl.cleaning/pipeline/00/completions/*"))
    copy.write_bytes(source.read_bytes())
    clean(PIPELINE, [str(copy)], tmp_path / "out" / "out.jsonl", workers=1)
    assert contents(tmp_path / "out") == expected


def test_an_error_in_one_of_several_workers_reaches_the_user(tmp_path: Path, source: Path) -> None:
    copy = tmp_path / "rows.jsonl"
    copy.write_bytes(source.read_bytes() + b'{"text": 5, "tags": []}\n')
    process = start(tmp_path / "script.py", copy, tmp_path / "out.jsonl", workers=2)
    _, said = process.communicate(timeout=120)
    assert "DataError: rows.jsonl:" in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith(
        "'text' holds a number, expected text or a list of texts; name another field in the pipeline."
    )
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_killed_worker_is_reported_and_not_waited_for(background: bool, tmp_path: Path) -> None:
    # What a script starts in the background ignores the signal of Ctrl-C, and so does whatever that starts.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.default_int_handler)
    try:
        said = _last_words_when_workers_are_killed(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "MachineError: A worker process died while collecting for" in said
    assert not (tmp_path / "out.jsonl").exists()


def _last_words_when_workers_are_killed(tmp_path: Path) -> str:
    source = tmp_path / "rows.jsonl"
    slow = "ab " * 30_000
    source.write_text(
        "".join(json.dumps({"text": f"{number} {slow}", "tags": []}) + "\n" for number in range(1200))
    )
    process = start(tmp_path / "script.py", source, tmp_path / "out.jsonl", workers=2, grace_s=1.5)
    logs = tmp_path / ".out.jsonl.cleaning" / "pipeline" / "00" / "logs"
    deadline = time.monotonic() + 60
    while not list(logs.glob("*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1)  # long enough for whoever minds the workers to have seen them, on a busy machine as well
    servers = psutil.Process(process.pid).children(recursive=True)
    # All of them: one that has done its part already would not be missed.
    for worker in servers:
        with suppress(psutil.NoSuchProcess):
            if worker.ppid() != process.pid:
                worker.kill()
    try:
        return process.communicate(timeout=60)[1]
    finally:
        process.kill()  # one that waits for ever must not wait into the next test
        process.communicate()


def test_two_at_once_for_one_output_are_refused(tmp_path: Path, source: Path) -> None:
    from rush.data.storage import folder_lock

    working = tmp_path / ".out.jsonl.cleaning"
    working.mkdir()
    with folder_lock(working, wait=False), pytest.raises(MachineError, match="by another process"):
        clean(PIPELINE, [str(source)], tmp_path / "out.jsonl", workers=1)


LIMITED = """
import json, resource, sys
from rush.data.clean import clean, parse_pipeline

def now(what):  # getrusage would tell of the process this one was forked from
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status[what].split()[0]) * 1024

if __name__ == "__main__":
    pipeline, room = parse_pipeline({"stage": json.loads(sys.argv[1])}), int(sys.argv[2])
    few, source, output = sys.argv[3:]
    clean(pipeline, [few], few + ".out.jsonl", workers=1)  # what is imported for the work
    limit, before = now("VmData") + room, now("VmHWM")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    report = clean(pipeline, [source], output, workers=1)
    print(json.dumps({"grown": now("VmHWM") - before, "removed": [stage["removed"] for stage in report["stages"]]}))
"""


@pytest.mark.slow
def test_a_file_larger_than_the_memory_limit_is_cleaned(tmp_path: Path) -> None:
    """The limit is on the writable memory that is taken for the work; the stages are those that compare all documents."""
    room = 40 << 20
    source, few = tmp_path / "big.jsonl", tmp_path / "few.jsonl"
    few.write_text('{"text": "one two", "tags": ["usual"]}\n' * 3)
    chance = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bdfg" for b in "aeiou" for c in "klmn"]
    bodies = [" ".join(chance.choices(words, k=20_000)) for _ in range(8)]
    written, count, copies = 0, 0, 0
    with source.open("w") as file:
        while written <= room:
            text = " ".join(chance.choices(words, k=40))
            row = {"text": text, "tags": ["usual", *([f"rare {count}"] if count % 50 == 0 else [])]}
            line = json.dumps({**row, "body": f"{count} {chance.choice(bodies)}"}) + "\n"
            again = count % 40 == 1
            written += file.write(line) + (file.write(line) if again else 0)
            copies += again
            count += 1
    stages = [
        {"kind": "rare_items", "field": "tags", "min_count": 3},
        {"kind": "exact_duplicates", "fields": ["*"]},
        {"kind": "near_duplicates"},
    ]
    (tmp_path / "script.py").write_text(LIMITED)
    files = [str(few), str(source), str(tmp_path / "out.jsonl")]
    command = [sys.executable, str(tmp_path / "script.py"), json.dumps(stages), str(room), *files]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout)
    assert found["removed"] == [-(-count // 50), copies, 0]
    assert source.stat().st_size > room
    assert found["grown"] < source.stat().st_size * 0.75


SLURM = {"partition": "cpu", "time": "04:00:00"}


@pytest.mark.slow
def test_slurm_gets_a_chain_of_jobs_that_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Slurm's commands that runs each submitted script at once, here."""
    stages = parse_pipeline({"stage": [{"kind": "words", "min": 2}, {"kind": "exact_duplicates"}]})
    source = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"row {number % 700} {'x' * 20}"}) for number in range(800)]
    source.write_text("\n".join([*lines, '{"text": "short"}']))
    before = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no sbatch"):
        clean(stages, [str(source)], tmp_path / "out.jsonl", executor="slurm", options=SLURM)
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "sbatch").write_text(
        "#!/bin/bash\nscript=${@: -1}\n"
        'last=$(sed -n "s/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p" $script)\n'
        f"sed -n 's/^#SBATCH --job-name=//p' $script >> {tmp_path}/jobs\n"
        'if grep -q "srun" $script; then\n'
        "  for task in $(seq 0 $last); do\n"
        f"    SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=here bash $script >> {tmp_path}/log 2>&1 || exit 1\n"
        "  done\nfi\necho Submitted batch job 17\n"
    )
    (commands / "srun").write_text(
        '#!/bin/bash\nwhile [[ $1 == -* || $1 =~ ^[0-9]+$ ]]; do shift; done\nexec "$@"\n'
    )
    (commands / "scontrol").write_text("#!/bin/bash\necho here\n")
    for command in commands.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{Path(sys.executable).parent}:{before}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(RecipeError, match=r"needs the option\(s\) time"):
        clean(stages, [str(source)], tmp_path / "a.jsonl", executor="slurm", options={"partition": "cpu"})
    assert clean(stages, [str(source)], tmp_path / "a.jsonl", executor="slurm", options=SLURM) is None
    clean(stages, [str(source)], tmp_path / "b.jsonl", workers=1)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 700
    jobs = [line.strip() for line in (tmp_path / "jobs").read_text().splitlines() if "rush" in line]
    assert list(dict.fromkeys(jobs)) == [f"rush-clean-{number}" for number in (1, 2, 3, 4)]
