"""Each of a thousand bit flips and truncations, anywhere in a checkpoint or in its remote copy, is detected."""

import numpy as np

from pipelinerl import rng
from pipelinerl.errors import CheckpointError
from pipelinerl.system.storage import Storage
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore, load
from pipelinerl.training.checkpoints.copies import CheckpointCopies
from pipelinerl.training.checkpoints.manifest import Manifest, Retention
from tests.fakes.checkpoints import model_directory, save, state_of

SEED = 0
DAMAGES = 1000


def damages(files, *, seed):
    """Yield (description, file, damaged bytes): two of three damages flip a bit, the third truncates the file."""
    source = rng.generator(seed, "damages")
    names = sorted(files)
    for _ in range(DAMAGES):
        name = names[source.integers(len(names))]
        data = files[name]
        where = int(source.integers(len(data)))
        if source.integers(3):
            bit = int(source.integers(8))
            flipped = np.frombuffer(data, np.uint8).copy()
            flipped[where] ^= 1 << bit
            yield f"seed {seed}: bit {bit} of byte {where} of {name}", name, flipped.tobytes()
        else:
            yield f"seed {seed}: {name} cut to {where} of {len(data)} bytes", name, data[:where]


def missed(files, write, check, *, seed):
    """Return descriptions of the damages that `check` does not detect; `write` writes a damaged file."""
    unseen = []
    for what, name, data in damages(files, seed=seed):
        write(name, data)
        try:
            check()
        except CheckpointError:
            pass
        else:
            unseen.append(what)
        write(name, files[name])
    check()
    return unseen


def test_any_bit_flip_or_truncation_in_a_checkpoint_directory_is_detected(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, model_directory=model_directory(tmp_path / "model"))
    path = save(store, 7)
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert len(files) == 5
    assert missed(files, lambda name, data: (path / name).write_bytes(data), lambda: load(path), seed=SEED) == []
    assert load(path) == state_of(7)


def test_any_bit_flip_or_truncation_in_a_remote_checkpoint_copy_is_detected(tmp_path):
    (tmp_path / "recipe.toml").write_text("name = 'x'\n")
    copies = CheckpointCopies(
        f"memory://{tmp_path.name}/copies", retention=Retention(1), run_files=(tmp_path / "recipe.toml",)
    )
    store = CheckpointStore(
        tmp_path / "checkpoints", keep=1, model_directory=model_directory(tmp_path / "model"), copies=copies
    )
    store.copy(save(store, 7))
    (copy,) = copies.newest()
    place = Storage(copies.url)
    files = {name: place.read(f"{copy.folder}/{name}") for name in (*copy.manifest.files, "manifest.json")}
    assert len(files) == 6

    def check():
        text = place.read(f"{copy.folder}/manifest.json")
        assert Manifest.parse(text, where="here") == copy.manifest
        copies.fetch(copy, tmp_path / "fetched")

    assert missed(files, lambda name, data: place.write(f"{copy.folder}/{name}", data), check, seed=SEED + 1) == []
