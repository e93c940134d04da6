"""Upload a model to the Hugging Face hub: export it with a model card, list the files, upload."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.checkpoint import restore
from rush.data.hub_client import HubId, chain, endpoint, hub_api, offline, parse_id, sentence, status_of
from rush.errors import DataError, MachineError, RecipeError
from rush.files import write_atomic
from rush.hub.card import Card, card_of, public_base
from rush.hub.config import shape_from_config
from rush.hub.export import export_adapter, export_model
from rush.hub.folders import existing_folder, find_checkpoint
from rush.hub.json_files import read_json, write_json
from rush.hub.peft import is_peft_folder
from rush.models import Shape
from rush.recipe_io import load_recipe
from rush.records.run_folder import RunFolder

Note = Callable[[str], None]
UPLOADED = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")
"""Endings of files of a Hugging Face folder that are uploaded."""


@dataclass(frozen=True)
class Upload:
    """A folder that is ready to be uploaded."""

    folder: Path
    adapter: bool

    @property
    def files(self) -> dict[str, int]:
        """Names and sizes."""
        return {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())}

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


def repository(name: str) -> str:
    """The OWNER/NAME to upload to, checked; RecipeError for anything else."""
    repo = parse_id(f"hub:{name}")
    if repo is None or repo.revision is not None or name.startswith("hub:"):
        raise RecipeError(
            f"--to is {name!r}; allowed: OWNER/NAME on the hub (a branch is named with --revision)."
        )
    return repo.name


def prepare_upload(
    path: str | Path,
    to: Path,
    title: str,
    *,
    checkpoint: str = "last",
    merged: bool = False,
    base: str | None = None,
    license: str | None = None,
    record: Path | None = None,
    evaluation: Path | None = None,
    note: Note,
) -> Upload:
    """Write the folder that is uploaded: the exported model or adapter, and its card."""
    folder = existing_folder(path, note)
    run = RunFolder(folder)
    adapter, step = is_peft_folder(folder), None
    if run.recipe.is_file():
        found = find_checkpoint(run, checkpoint, note)
        step, adapter = found.step, restore.base_record(found) is not None and not merged
        shape: Shape | None = load_recipe(str(run.recipe)).shape()
        if adapter:
            export_adapter(folder, to, checkpoint=checkpoint, note=note)
            base = _name_base(to, base, note)
        else:
            export_model(folder, to, checkpoint=checkpoint, note=note)
    else:
        shape = _copy(folder, to, adapter)
        base = _name_base(to, base, note) if adapter else base
    card: Card = card_of(
        folder,
        title,
        shape,
        step=step,
        adapter=adapter,
        license=license,
        base=base,
        record=record,
        evaluation=evaluation,
    )
    write_atomic(to / "README.md", card.text())
    return Upload(to, adapter)


def _name_base(to: Path, base: str | None, note: Note) -> str | None:
    """Have adapter_config.json name the base for other machines: `--base`, or what the run started from."""
    config = read_json(to / "adapter_config.json")
    if base is not None:
        write_json(to / "adapter_config.json", config | {"base_model_name_or_path": repository(base), "revision": None})  # fmt: skip
        return base
    named = config.get("base_model_name_or_path")
    if named is None:
        return None
    public = public_base(str(named))
    if public != named:
        write_json(to / "adapter_config.json", config | {"base_model_name_or_path": public})
        note(
            f"The adapter's base is a folder of this machine, {named}: whoever downloads the adapter must have it. Name its place on "
            "the hub with --base OWNER/NAME."
        )
    revision = config.get("revision")
    return f"{public}@{revision}" if revision else public


def _copy(folder: Path, to: Path, adapter: bool) -> Shape | None:
    """Copy a Hugging Face folder unchanged: its safetensors, settings and tokenizer. Returns the shape of a model."""
    if not adapter and not (folder / "config.json").is_file():
        raise DataError(
            f"{folder} is neither a run folder, nor a Hugging Face folder (config.json), nor an adapter's (adapter_config.json)."
        )
    if to.exists() and any(to.iterdir()):
        raise RecipeError(f"{to} exists and is not an empty folder; name a new one.")
    to.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in UPLOADED and not path.name.startswith("."):
            shutil.copyfile(path, to / path.name)
    return None if adapter else shape_from_config(read_json(folder / "config.json"))


def upload(ready: Upload, to: str, *, private: bool, revision: str | None, note: Note) -> str:
    """Upload a prepared folder; the address of its commit."""
    if offline():
        raise MachineError("HF_HUB_OFFLINE is set, so nothing is uploaded; unset it to upload.")
    repo = HubId(to, revision)
    api = hub_api()
    with _explained(repo):
        api.create_repo(to, private=private or None, exist_ok=True)
        if private and not api.repo_info(to).private:
            raise RecipeError(
                f"{to} already exists and is public, but --private was given; make it private on the hub first, or choose another "
                "name."
            )
        if revision is not None:
            api.create_branch(to, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=to,
            folder_path=ready.folder,
            revision=revision,
            commit_message=f"Upload {'an adapter' if ready.adapter else 'a model'} with Optimization Rush",
        )
    return str(getattr(done, "commit_url", "") or f"{endpoint()}/{to}")


@contextmanager
def _explained(repo: HubId) -> Iterator[None]:
    """Turn errors of an upload into messages."""
    try:
        yield
    except (RecipeError, MachineError, DataError):
        raise
    except Exception as error:
        names = {type(one).__name__ for one in chain(error)}
        if status_of(error) in (401, 403) or "LocalTokenNotFoundError" in names:
            raise MachineError(
                f"The Hugging Face hub does not let you upload to {repo}: it needs a token that may write there (`hf auth login`, or "
                "HF_TOKEN)."
            ) from error
        problem: Any = sentence(error, repo)
        if problem is None:
            raise
        raise problem from error


def size_words(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes} bytes"


def free_folder(name: str) -> Path:
    """A new folder for a dry run: `pushes/NAME`, or with a number behind it."""
    first = Path("pushes") / name.split("/")[-1]
    taken = (first.with_name(f"{first.name}-{number}") for number in range(2, 10_000))
    return first if not os.path.exists(first) else next(path for path in taken if not os.path.exists(path))
