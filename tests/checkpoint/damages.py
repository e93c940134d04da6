"""Every damage to a checkpoint that we could think of, as functions of its folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

ALONE = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json")
"""The files that one rank writes, beside the manifest."""
NEW, OLD = "step-000020", "step-000010"

Damage = Callable[[Path], None]


def truncate(name: str, keep: float) -> Damage:
    def damage(folder: Path) -> None:
        size = (folder / name).stat().st_size
        os.truncate(folder / name, min(int(size * keep), size - 1))

    return damage


def append(name: str) -> Damage:
    def damage(folder: Path) -> None:
        with open(folder / name, "ab") as file:
            file.write(b"\x00")

    return damage


def flip(name: str, where: float, bit: int) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(where * (len(content) - 1))] ^= 1 << bit
        (folder / name).write_bytes(content)

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def swap(first: str, second: str) -> Damage:
    def damage(folder: Path) -> None:
        a, b = (folder / first).read_bytes(), (folder / second).read_bytes()
        (folder / first).write_bytes(b)
        (folder / second).write_bytes(a)

    return damage


def from_other(name: str) -> Damage:
    return lambda folder: shutil.copy(folder.parent / OLD / name, folder / name) and None


def edit(*keys: str, value: object) -> Damage:
    """Change one value in the manifest and write it back as a careful person would."""

    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        body = json.loads(path.read_text())
        inner = body
        for key in keys[:-1]:
            inner = inner[key]
        assert inner[keys[-1]] != value
        inner[keys[-1]] = value
        path.write_text(json.dumps(body, indent=2) + "\n")

    return damage


def delete_row(name: str) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        body = json.loads(path.read_text())
        del body["files"][name]
        path.write_text(json.dumps(body, indent=2) + "\n")

    return damage


def delete_row_and_file(name: str) -> Damage:
    def damage(folder: Path) -> None:
        delete_row(name)(folder)
        (folder / name).unlink()

    return damage


def overwrite(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content) and None


def extra_file(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(b"?") and None


def extra_folder(folder: Path) -> None:
    (folder / "more").mkdir()


def file_becomes_folder(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def file_becomes_link(name: str) -> Damage:
    def damage(folder: Path) -> None:
        moved = folder.parent / "moved"
        os.rename(folder / name, moved)
        (folder / name).symlink_to(moved)

    return damage


def holes(name: str) -> Damage:
    """A block of zeros where data was, the length unchanged: what a power cut does to unflushed files."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[-64:] = bytes(64)
        (folder / name).write_bytes(content)

    return damage


def reformat(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))


def older_manifest(folder: Path) -> None:
    shutil.copy(folder.parent / OLD / "manifest.json", folder / "manifest.json")


def damages(files: Sequence[str]) -> dict[str, tuple[Damage, str]]:
    """Every damage to a checkpoint with these files (a model's, an optimizer's, others; the manifest comes on top), with what a
    message must name."""
    found: dict[str, tuple[Damage, str]] = {}
    for name in (*files, "manifest.json"):
        found |= {
            f"{name} truncated by a byte": (truncate(name, 1.0), name),
            f"{name} truncated to half": (truncate(name, 0.5), name),
            f"{name} of zero length": (truncate(name, 0.0), name),
            f"{name} longer by a byte": (append(name), name),
            f"{name} bit flipped at the start": (flip(name, 0.0, 0), name),
            f"{name} bit flipped in the middle": (flip(name, 0.5, 3), name),
            f"{name} bit flipped at the end": (flip(name, 1.0, 6), name),
            f"{name} removed": (remove(name), name),
        }
    for name in files:
        if name != "pieces.json":  # the same in both checkpoints: the tensors lie in the same places
            found[f"{name} of the other checkpoint"] = (from_other(name), name)
    model = files[0]
    optimizer = next(name for name in files if name.startswith("optimizer"))
    return found | {
        "model and optimizer files swapped": (swap(model, optimizer), model),
        "state and random files swapped": (swap("random.safetensors", "state.json"), "random.safetensors"),
        "zeros in the last block": (holes(model), model),
        "manifest step edited": (edit("step", value=21), "manifest.json"),
        "manifest step negative": (edit("step", value=-1), "manifest.json"),
        "manifest sha edited": (edit("files", model, "sha256", value="0" * 64), "manifest.json"),
        "manifest size edited": (edit("files", model, "size_bytes", value=7), "manifest.json"),
        "manifest metric edited": (edit("meta", "metrics", "val_loss", value=0.001), "manifest.json"),
        "manifest digest edited": (edit("digest", value="0" * 64), "manifest.json"),
        "manifest of an unknown version": (edit("version", value=2), "version 2"),
        "manifest of another format": (edit("format", value="other"), "manifest.json"),
        "manifest row deleted": (delete_row(optimizer), "manifest.json"),
        "manifest row and file deleted": (delete_row_and_file(optimizer), "manifest.json"),
        "manifest of the other checkpoint": (older_manifest, "step 10"),
        "manifest empty": (overwrite("manifest.json", b""), "manifest.json"),
        "manifest not JSON": (overwrite("manifest.json", b"hello"), "manifest.json"),
        "manifest not UTF-8": (overwrite("manifest.json", b'{"format": "\xff"}'), "manifest.json"),
        "manifest a JSON list": (overwrite("manifest.json", b"[1, 2]"), "manifest.json"),
        "manifest written differently": (reformat, "manifest.json"),
        "an extra file": (extra_file("pytorch_model.bin"), "pytorch_model.bin"),
        "a hidden extra file": (extra_file(".model.tmp"), ".model.tmp"),
        "an extra folder": (extra_folder, "more"),
        "a folder in place of a file": (file_becomes_folder(model), model),
        "a link in place of a file": (file_becomes_link(model), model),
    }
