"""Bad input, as a person would type it: one clear message, the right exit code, no traceback, nothing lost."""

from __future__ import annotations

import io
import json
import os
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.cli import main
from rush.data import train_bpe
from rush.records.lock import FolderLock
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import small_recipe, write_corpus


class World:
    """A folder with a corpus, a recipe, a finished run, and a way to call the command line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.corpus = write_corpus(path / "corpus")
        self.recipe = path / "small.toml"
        self.recipe.write_text(small_recipe(self.corpus, schedule={"steps": 3, "warmup": 1}))
        self.run = path / "run"

    def file(self, name: str, content: str | bytes) -> Path:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        return target

    def tokenizer(self, name: str, config: dict[str, Any] | None = None, **parts: Any) -> Path:
        """The tokenizer of the run with other parts."""
        tree = json.loads((self.run / "tokenizer" / "tokenizer.json").read_text()) | parts
        self.file(f"tokenizers/{name}/tokenizer.json", json.dumps(tree))
        settings = {"eos_token": "<|endoftext|>"} | (config or {})
        return self.file(f"tokenizers/{name}/tokenizer_config.json", json.dumps(settings)).parent

    def inspect(self, template: str | None, row: dict[str, Any] | None = None) -> list[str]:
        """Fine-tuning data of one row, with this chat template."""
        folder = self.tokenizer(
            f"template-{hash(template)}", {"chat_template": template} if template else None
        )
        talk = self.file("talk.jsonl", json.dumps(TALK if row is None else row) + "\n")
        data = {"source": "files", "files": [str(talk)], "tokenizer": str(folder)}
        recipe = small_recipe(
            self.corpus,
            data=data,
            objective={"kind": "sft"},
            batch={"micro": 2, "sequence": 64, "total_tokens": 256},
        )
        return ["data", "inspect", str(self.file("sft.toml", recipe))]

    def train(self, *changes: str, out: str = "new") -> list[str]:
        return ["train", str(self.recipe), *changes, "--out", str(self.path / out)]

    def on_files(self, name: str, content: str | bytes, *changes: str) -> list[str]:
        return self.train(f"data.files=['{self.file(name, content)}']", *changes)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("world")
    before = {
        key: os.environ.get(key) for key in ("RUSH_CACHE", "HF_HUB_OFFLINE", "WANDB_API_KEY", "WANDB_MODE")
    }
    os.environ |= {"RUSH_CACHE": str(fresh_cache(path / "cache")), "HF_HUB_OFFLINE": "1"}
    os.environ.pop("WANDB_API_KEY", None)
    os.environ.pop("WANDB_MODE", None)
    made = World(path)
    with pytest.raises(SystemExit) as ended:
        main(made.train(out="run"))
    assert ended.value.code in (0, None)
    yield made
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def damage_all(world: World) -> None:
    for manifest in (world.path / "ruined" / "checkpoints").glob("step-*/model.safetensors"):
        manifest.write_bytes(manifest.read_bytes()[:-1])


def ruined_run(world: World) -> list[str]:
    import shutil

    shutil.copytree(world.run, world.path / "ruined")
    damage_all(world)
    return ["train", "--out", str(world.path / "ruined"), "--resume"]


def moved_corpus(world: World) -> list[str]:
    """A run whose corpus changed after it was trained."""
    import shutil

    other = world.path / "corpus2"
    shutil.copytree(world.corpus, other)
    recipe = world.file("two.toml", small_recipe(other, schedule={"steps": 2, "warmup": 1}))
    with pytest.raises(SystemExit):
        main(["train", str(recipe), "--out", str(world.path / "run2")])
    (other / "extra.txt").write_text("one more document\n" * 50)
    return ["train", "--out", str(world.path / "run2"), "--resume"]


def pickle_file(world: World) -> list[str]:
    target = world.path / "weights.pt"
    torch.save({"a": torch.zeros(2)}, target)
    return ["generate", str(target), "--prompt", "x"]


def pickle_folder(world: World) -> list[str]:
    config = {
        "model_type": "gpt2",
        "vocab_size": 32,
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
    }
    world.file("hf/config.json", json.dumps(config))
    torch.save({"a": torch.zeros(2)}, world.path / "hf" / "pytorch_model.bin")
    return ["generate", str(world.path / "hf"), "--prompt", "x"]


def other_shape(world: World) -> list[str]:
    return world.train(f"model.init_from={world.run}", "model.shape.num_layers=3", out="other")


def other_tokenizer(world: World) -> list[str]:
    """As many entries as the model's own, but others."""
    words = (
        "the quick brown fox jumps over the lazy dog while a small cat sleeps under an old apple tree " * 20
    )
    train_bpe([words], 320).save(world.path / "other-tokenizer")
    changes = (f"model.init_from={world.run}", f"data.tokenizer={world.path / 'other-tokenizer'}")
    return world.train(*changes, out="mismatch")


TALK = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def grow(word: str, steps: str = "normalizers") -> dict[str, Any]:
    """Four replacements, each of which writes a word 500 times for once."""
    step = {"type": "Replace", "pattern": {"String": word}, "content": word * 500}
    return {"type": "Sequence", steps: [step] * 4}


def parquet_file(texts: list[Any]) -> bytes:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    written = io.BytesIO()
    parquet.write_table(arrow.table({"text": texts}), written, compression="zstd")
    return written.getvalue()


def parquet_bomb() -> bytes:
    """A thousand rows that name one text of two megabytes."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    written = io.BytesIO()
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 1000), arrow.array(["a" * 2_000_000]))
    parquet.write_table(arrow.table({"text": column}), written, compression="zstd")
    return written.getvalue()


def damaged_pages() -> bytes:
    """Every 40th byte between the header and the footer is another."""
    content = bytearray(parquet_file([f"row {n} of a table" for n in range(3000)]))
    for place in range(200, len(content) - 2000, 40):
        content[place] ^= 0x55
    return bytes(content)


CASES: list[tuple[str, int, list[str], Callable[[World], list[str]]]] = [
    # 2: recipe or arguments
    ("no recipe", 2, ["no recipe was given"], lambda w: ["train"]),
    ("no such recipe", 2, ["'gpt2-124'", "did you mean 'gpt2-124m'"], lambda w: ["train", "gpt2-124"]),
    ("no such file", 2, ["no recipe file at"], lambda w: ["train", str(w.path / "none.toml")]),
    ("data in place of a recipe", 2, ["is a data file", "data.source=files"], lambda w: ["data", "inspect", "chat.jsonl"]),
    ("not TOML", 2, ["not valid TOML"], lambda w: ["train", str(w.file("bad.toml", "model = ["))]),
    ("unknown key", 2, ["batch.micr", "did you mean 'batch.micro'"], lambda w: w.train("batch.micr=1")),
    ("wrong type", 2, ["optimizer.lr is 'fast'", "number"], lambda w: w.train("optimizer.lr=fast")),
    ("batch does not divide", 2, ["batch.total_tokens is 65", "64 or 96"], lambda w: w.train("batch.total_tokens=65")),
    ("sequence too long", 2, ["batch.sequence is 512", "at most 256"], lambda w: w.train("batch.sequence=512", "batch.total_tokens=1024")),
    ("heads do not divide", 2, ["num_heads"], lambda w: w.train("model.shape.num_heads=3")),
    ("unknown technique", 2, ["did you mean 'compile'"], lambda w: w.train("techniques=['compil']")),
    ("unknown knob", 2, ["has no knob 'speed'"], lambda w: w.train("techniques=[{name='compile', speed=1}]")),
    ("conflict", 2, ["cannot be combined"], lambda w: w.train("techniques=['amp_bf16', 'pure_bf16']")),
    ("layout", 2, ["layout.fsdp is 2"], lambda w: w.train("layout.fsdp=2", "batch.total_tokens=128")),
    ("unknown source", 2, ["fineweb", "fineweb-edu"], lambda w: w.train("data.source=fineweb")),
    ("folder holds a run", 2, ["already holds a run", "--resume"], lambda w: w.train(out="run")),
    ("resume without a folder", 2, ["--resume needs --out"], lambda w: ["train", "tiny", "--resume"]),
    ("resume nothing", 2, ["holds no run"], lambda w: ["train", "--out", str(w.path / "void"), "--resume"]),
    ("resume another recipe", 2, ["another recipe", "optimizer.lr: 0.01 → 0.5"],
     lambda w: [*w.train("optimizer.lr=0.5", out="run"), "--resume"]),
    ("folder holds something else", 2, ["is no run folder and holds other files (notes.txt)"],
     lambda w: (w.file("mine/notes.txt", "x"), w.train(out="mine"))[1]),
    ("a hidden size beyond reason", 2, ["hidden must be a whole number from 1 to 1,048,576"], lambda w: w.train("model.shape.hidden=1000000000001")),
    ("a vocabulary beyond reason", 2, ["data.vocab_size is 1000000000000", "16777216"], lambda w: w.train("data.vocab_size=1000000000000")),
    ("a micro batch beyond reason", 2, ["batch.micro is 1000000000000", "at most 16,777,216"], lambda w: w.train("batch.micro=1000000000000")),
    ("a seed of more than 64 bits", 2, ["run.seed is a number with 20 digits"], lambda w: w.train(f"run.seed={2**64}")),
    ("a number of 5,000 digits", 2, ["run.seed is", "(5,002 characters)"], lambda w: w.train(f"run.seed={'9' * 5000}")),
    ("a file with a number of 5,000 digits", 2, ["holds a number with thousands of digits"], lambda w: ["train", str(w.file("long.toml", f"a = {'9' * 5000}"))]),
    ("a memory limit of a byte", 2, ["run.memory_limit_gb is 1e-09", "0.001"], lambda w: w.train("run.memory_limit_gb=1e-9")),
    ("3,000 brackets", 2, ["data.files is", "(3,002 characters)"], lambda w: w.train(f"data.files={'[' * 3000}")),
    ("a file of 3,000 brackets", 2, ["nested too deeply"], lambda w: ["train", str(w.file("deep.toml", f"a = {'[' * 3000}"))]),
    ("control characters in a name", 2, ["\\x1b[2J"], lambda w: ["train", "\x1b[2J"]),
    ("out is a file", 2, ["is a file"], lambda w: w.train(out="small.toml")),
    ("init_from another shape", 2, ["model.init_from", "num_layers is 2, wanted 3"], other_shape),
    ("negative temperature", 2, ["temperature", "-1"], lambda w: ["generate", str(w.run), "--temperature", "-1"]),
    ("top-p above one", 2, ["top_p", "1.5"], lambda w: ["generate", str(w.run), "--top-p", "1.5"]),
    ("no such checkpoint", 2, ["no checkpoint '77'", "last, best"], lambda w: ["generate", str(w.run), "--checkpoint", "77"]),
    ("export over something", 2, ["not an empty folder"], lambda w: ["export", str(w.run), "--to", str(w.corpus)]),
    ("unknown command", 2, ["No such command"], lambda w: ["trian", "tiny"]),
    ("unknown option", 2, ["No such option"], lambda w: ["train", "tiny", "--fast"]),
    # 3: data
    ("empty corpus", 3, ["empty"], lambda w: w.on_files("empty.txt", "")),
    ("no file matches", 3, ["none/*.txt"], lambda w: w.train("data.files=['none/*.txt']")),
    ("broken JSONL line", 3, ["broken.jsonl:3", "fix or remove the line"],
     lambda w: w.on_files("broken.jsonl", '{"text": "one"}\n{"text": "two"}\n{"text": \n')),
    ("missing field", 3, ["fields.jsonl", "'text'", "body"], lambda w: w.on_files("fields.jsonl", '{"body": "one"}\n')),
    ("not UTF-8", 3, ["latin.txt", "UTF-8"], lambda w: w.on_files("latin.txt", b"caf\xe9 " * 300)),
    ("not Parquet", 3, ["fake.parquet"], lambda w: w.on_files("fake.parquet", b"PAR1 no")),
    ("too little text", 3, ["too short"], lambda w: w.on_files("short.txt", "a b c", "data.vocab_size=257")),
    ("nothing held out", 3, ["validation split", "too short", "a larger data.validation"],
     lambda w: w.on_files("one.txt", "the only document " * 90, f"data.tokenizer={w.run / 'tokenizer'}")),
    ("vocabulary not reached", 3, ["vocab"], lambda w: w.on_files("little.txt", "a b c")),
    ("missing tokenizer", 3, ["tokenizer"], lambda w: w.train(f"data.tokenizer={w.path / 'no' / 'tokenizer.json'}")),
    ("wrong tokenizer file", 3, ["tokenizer"], lambda w: w.train(f"data.tokenizer={w.file('tokenizer.json', '{}')}")),
    ("tokenizer too large", 3, ["320", "300"],
     lambda w: w.train(f"data.tokenizer={w.run / 'tokenizer'}", "model.shape.vocab_size=300")),
    ("tokenizer of another model", 3, ["is not the tokenizer of the weights of", "of 320 entries differ"], other_tokenizer),
    ("a pickle", 3, ["pickle"], pickle_file),
    ("a pickle in a Hugging Face folder", 3, ["pytorch_model.bin"], pickle_folder),
    ("no model there", 3, ["neither a run folder", "config.json"], lambda w: ["generate", str(w.corpus)]),
    ("no folder there", 3, ["no folder"], lambda w: ["generate", str(w.path / "nowhere")]),
    ("every checkpoint damaged", 3, ["every checkpoint", "damaged"], ruined_run),
    ("corpus changed", 3, ["corpus is not the one"], moved_corpus),
    ("not a prepared corpus", 3, ["manifest"], lambda w: ["data", "verify", str(w.corpus)]),
    ("a tokenizer that backtracks", 3, ["cannot encode ordinary text", "Regex"],
     lambda w: w.train(f"data.tokenizer={w.tokenizer('regex', pre_tokenizer=split('(?:[a-z]+[a-z ]+)+#'))}")),
    ("a tokenizer that grows a text", 3, ["normalizer", "10,000 times as long"],
     lambda w: w.train(f"data.tokenizer={w.tokenizer('growth', normalizer=grow('zq'))}")),
    ("a decoder that grows a text", 3, ["decoder", "10,000 times as long"],
     lambda w: w.train(f"data.tokenizer={w.tokenizer('decoder', decoder=grow('e', 'decoders'))}")),
    ("a tokenizer cut short", 3, ["is not a tokenizer.json", "EOF"],
     lambda w: w.train(f"data.tokenizer={w.file('cut/tokenizer.json', (w.run / 'tokenizer' / 'tokenizer.json').read_bytes()[:-900])}")),
    ("a tokenizer nested deeply", 3, ["recursion limit"],
     lambda w: w.train(f"data.tokenizer={w.file('deep/tokenizer.json', '{' + chr(34) + 'model' + chr(34) + ':' + '[' * 99999)}")),
    ("an end token that is no text", 3, ["eos_token", "must be a text; found 5"],
     lambda w: w.train(f"data.tokenizer={w.tokenizer('number', config={'eos_token': 5})}")),
    ("damaged Parquet pages", 3, ["the Parquet file is damaged", "Fetch it again"],
     lambda w: w.on_files("pages.parquet", damaged_pages())),
    ("numbers in Parquet", 3, ["the text is int, expected a string"],
     lambda w: w.on_files("numbers.parquet", parquet_file([1, 2, 3]))),
    ("half a kilobyte of Parquet that decompresses to gigabytes", 3, ["decompresses to more than", "times its"],
     lambda w: w.on_files("bomb.parquet", parquet_bomb(), f"data.tokenizer={w.run / 'tokenizer'}")),
    ("a template that never ends", 3, ["talk.jsonl:1", "The chat template does not end"],
     lambda w: w.inspect("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}")),
    ("a template without bound on memory", 3, ["The chat template asks for more memory than is allowed"],
     lambda w: w.inspect("{{ 'a' * 10**10 }}")),
    ("a template that recurses", 3, ["it recurses or is nested too deeply"],
     lambda w: w.inspect("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}")),
    ("control characters in a role", 3, ["the role '\\x1b[2J'"],
     lambda w: w.inspect(None, {"messages": [{"role": "\x1b[2J", "content": "x"}]})),
    ("tools that no template writes", 3, ["talk.jsonl:1", "the row has tools, which the template (chatml) does not write"],
     lambda w: w.inspect(None, TALK | {"tools": [{"type": "function"}]})),
    ("a line of 50 MB", 3, ["talk.jsonl:1", "tokens, longer than batch.sequence = 64"],
     lambda w: w.inspect(None, {"prompt": "q", "completion": "x" * 50_000_000})),
    # 4: machine or environment
    ("no GPU", 4, ["cuda"], lambda w: w.train("run.device=cuda")),
    ("technique needs a GPU", 4, ["tf32 cannot run here", "CUDA"], lambda w: w.train("techniques=['tf32']")),
    ("unwritable folder", 4, ["Cannot write"], lambda w: ["train", str(w.recipe), "--out", "/proc/rush/run"]),
    ("hub not reachable", 4, ["data.files"], lambda w: ["train", "gpt2-124m", "data=published", "techniques=[]", "run.device=cpu",
                                                        "data.tokenizer=train", "--out", str(w.path / "hub")]),
    ("no login", 4, ["wandb"], lambda w: w.train("run.wandb=project")),
    # 5: diverged
    ("diverged", 5, ["step 2", "not updated", "last good checkpoint", "step-000001"],
     lambda w: w.train("optimizer.lr=1e30", "optimizer.clip=0", "run.save_every=1", "schedule.warmup=0", out="nan")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "said", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_bad_input_gets_one_message_and_its_exit_code(
    world: World,
    code: int,
    said: list[str],
    words: Callable[[World], list[str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    if code == 4 and torch.cuda.is_available():
        pytest.skip("a CUDA device is here, so nothing is missing")
    line = words(world)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(line)
    err = capfd.readouterr().err
    assert ended.value.code == code, err
    assert "Traceback" not in err
    assert all(part in " ".join(err.split()) for part in said), err
    if "error: " in err:
        message = err[err.index("error: ") :].strip()
        assert "\n" not in message, message
        assert message.endswith((".", ")")), message


def test_a_share_that_holds_no_document_takes_one_and_says_so(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(
            world.train(
                "data.validation=0.0000001",
                "run.validate_every=0",
                "schedule.steps=1",
                "schedule.warmup=0",
                out="one",
            )
        )
    err = " ".join(capfd.readouterr().err.split())
    assert ended.value.code in (0, None), err
    assert "data.validation = 1e-07 holds none of so few documents: one is held out instead." in err


def test_control_characters_of_rows_are_shown_and_not_sent(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of texts, of names of columns and of files; --json escapes them."""
    clear = "\x1b[2J\x9b2J\x7f"
    messages = [{"role": "user", "content": f"a {clear}"}, {"role": "assistant", "content": f"b {clear}"}]
    rows = "".join(json.dumps({"messages": messages, f"column{clear}": n}) + "\n" for n in range(9))
    line = world.inspect(None)
    file = world.file("odd\x1b[2J.jsonl", rows)
    line.append(f"data.files=[{json.dumps(str(file))}]")
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*line, "data.too_long=cut", *more])
        said = "".join(capfd.readouterr())
        assert ended.value.code in (0, None), said
        assert not [c for c in said if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    assert json.loads(said)["examples"][0]["pieces"][1]["text"].startswith(f"b {clear}")


def test_nothing_was_lost_of_the_finished_run(world: World) -> None:
    """After all of the above the finished run is whole: it has its rows and its checkpoints verify."""
    from rush.records.checkpoint_store import verify
    from rush.records.run_folder import RunFolder

    store = RunFolder(world.run).checkpoints
    assert store.steps()[-1] == 3
    assert verify(store.path(3)).step == 3
    assert len((world.run / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_folder_in_use_names_the_process_that_holds_it(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    held = world.path / "held"
    held.mkdir()
    with FolderLock(held), pytest.raises(SystemExit) as ended:
        main(world.train(out="held"))
    err = capfd.readouterr().err
    assert ended.value.code == 4
    assert f"process {os.getpid()}" in err


def test_debug_shows_the_traceback(world: World) -> None:
    from rush.errors import RecipeError

    with pytest.raises(RecipeError):
        main(["train", "nothing", "--debug"])


def test_no_message_carries_a_secret(
    world: World, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    secrets = {
        "WANDB_API_KEY": "wandb-secret-123",
        "HF_TOKEN": "hf_secret_456",
        "AWS_SECRET_ACCESS_KEY": "aws-789",
    }
    for key, value in secrets.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit):
        main(world.train(out="secret"))
    written = capfd.readouterr().err
    for path in (world.path / "secret").rglob("*"):
        if path.is_file():
            written += path.read_bytes().decode("latin-1")
    assert not any(value in written for value in secrets.values())
