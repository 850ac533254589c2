"""Any damage to a checkpoint's files is found and its file named."""

import errno
import hashlib
import io
import json
import random

import pytest

from megatron_rl.checkpoint import manifest as manifest_module
from megatron_rl.checkpoint.folder import commit, latest_checkpoint, temporary_folder, write_text
from megatron_rl.checkpoint.manifest import (
    MANIFEST,
    ManifestError,
    damage,
    digest_files,
    manifest_text,
    read_manifest,
)

KINDS = ("flip", "hole", "truncate", "delete", "swap")
SIZES = {
    "__0_0.distcp": 50_000, "__0_1.distcp": 50_000, "__1_0.distcp": 20_001, ".metadata": 4_000,
    "common.pt": 800,
    "metadata.json": 60, "rng_00000.safetensors": 9_000, "state.json": 5_000,
}  # fmt: skip


def make_checkpoint(folder, step=1, seed=0, **facts):
    rng = random.Random(seed)
    temporary = temporary_folder(folder, step)
    for name, size in SIZES.items():
        (temporary / name).write_bytes(rng.randbytes(size))
    text = manifest_text(
        digest_files(temporary, SIZES), {"step": step, "serial": step, "value": None} | facts
    )
    write_text(temporary / MANIFEST, text)
    return commit(temporary, step)


def spoil(path, kind, rng):
    """Damage one file; returns whether anything changed."""
    content = bytearray(path.read_bytes())
    before = bytes(content)
    if kind == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "hole":
        start = rng.randrange(len(content))
        content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    elif kind == "truncate":
        del content[rng.randrange(len(content)) :]
    elif kind == "delete":
        path.unlink()
        return True
    else:
        others = [other for other in path.parent.iterdir() if other != path]
        other = rng.choice(others)
        content[:], theirs = other.read_bytes(), bytes(content)
        other.write_bytes(theirs)
    path.write_bytes(content)
    return bytes(content) != before


def found_in(path):
    try:
        return damage(path, read_manifest(path))
    except ManifestError as error:
        return [str(error)]


def test_every_damage_is_found_and_its_file_named(memory, monkeypatch):
    monkeypatch.setattr(manifest_module, "BLOCK", 2**15)  # files of several blocks
    path = make_checkpoint(memory)
    original = {file.name: file.read_bytes() for file in path.iterdir()}
    assert set(original) == {*SIZES, MANIFEST} and found_in(path) == []
    rng = random.Random(1)
    trials = dict.fromkeys(KINDS, 0)
    for trial in range(1100):
        kind, name = KINDS[trial % len(KINDS)], rng.choice(sorted(original))
        changed = spoil(path / name, kind, rng)
        found = found_in(path)
        assert found if changed else not found, (kind, name)
        if changed:
            assert any(name in line or MANIFEST in line for line in found), (kind, name, found)
            trials[kind] += 1
        for file, content in original.items():
            if not (path / file).exists() or (path / file).read_bytes() != content:
                (path / file).write_bytes(content)
    assert sum(trials.values()) >= 1000 and min(trials.values()) >= 150, trials
    assert found_in(path) == []


def test_the_digest_of_several_blocks_depends_on_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "BLOCK", 1000)
    blocks = [bytes([n]) * 1000 for n in range(3)]
    digests = set()
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
        (tmp_path / "file").write_bytes(b"".join(blocks[n] for n in order))
        digests.add(digest_files(tmp_path, ["file"])["file"])
    (tmp_path / "file").write_bytes(b"")
    assert len(digests) == 3 and digest_files(tmp_path, ["file"])["file"].size == 0


def test_the_digest_of_a_file_is_that_of_the_digests_of_its_blocks(tmp_path):
    """Computed here from the definition, so that checkpoints of earlier versions remain valid:
    blocks of 64 MiB, 32 bytes.
    """

    def blake2b(content):
        return hashlib.blake2b(content, digest_size=32)

    with open(tmp_path / "file", "wb") as file:
        file.seek(2**26)  # a hole, which reads as zeros
        file.write(b"end")
    of_blocks = blake2b(bytes(2**26)).digest() + blake2b(b"end").digest()
    expected = {"file": (2**26 + 3, blake2b(of_blocks).hexdigest())}
    assert digest_files(tmp_path, ["file"]) == expected
    line, digest, end = manifest_text(expected, {"step": 1}).split("\n")
    assert json.loads(line) == {"files": {"file": list(expected["file"])}, "facts": {"step": 1}}
    assert (digest, end) == (blake2b(line.encode()).hexdigest(), "")


def test_every_damaged_file_has_a_line_that_describes_it(tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path)
    manifest = read_manifest(path)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (path / name).unlink()
    (path / "state.json").write_bytes(b"short")
    (path / "common.pt").write_bytes(bytes(SIZES["common.pt"]))
    changed = f"{path}/common.pt: its bytes are not those that were written (BLAKE2b differs)"
    lines = [
        f"{path}/__0_0.distcp: missing",
        f"{path}/__1_0.distcp: missing",
        f"{path}/state.json: 5 bytes, 5000 were written",
    ]
    assert damage(path, manifest) == [*lines, changed]
    assert damage(path, manifest, ["common.pt", "metadata.json"]) == [changed]
    assert damage(path, manifest, []) == []

    class Broken(io.BytesIO):
        def read(self, size):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(manifest_module, "open", lambda *args, **kwargs: Broken(), raising=False)
    *named, unreadable = damage(path, manifest)
    assert named == lines and unreadable.endswith(": Input/output error")
    assert unreadable.split(":")[0] in {f"{path}/{name}" for name in SIZES}, (
        "a failed read does not say which file"
    )


def test_a_changed_pointer_never_leads_to_another_checkpoint(tmp_path):
    """Every bit of `latest` is flipped in turn, while there is a second good checkpoint."""
    make_checkpoint(tmp_path, 2, seed=2)
    path = make_checkpoint(tmp_path, 3, seed=3)
    pointer = tmp_path / "latest"
    content = pointer.read_bytes()
    assert latest_checkpoint(tmp_path) == path
    refused = 0
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        pointer.write_bytes(changed)
        try:
            assert latest_checkpoint(tmp_path) == path  # harmless, such as a blank
        except ValueError as error:
            assert "step_000002" in str(error) and "--checkpoint.load" in str(error)
            refused += 1
    assert refused > 7 * len(content)
    pointer.write_text(json.dumps({"name": "step_000002", "manifest": read_manifest(path).digest}))
    with pytest.raises(ValueError, match="not the checkpoint it was written for"):
        latest_checkpoint(tmp_path)
