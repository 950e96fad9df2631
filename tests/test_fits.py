from pathlib import Path

import pytest
import torch
from tiny import random_transform

from quantmla import fits
from quantmla.checkpoint.source import open_source
from quantmla.transform.store import transforms_to_bytes


def test_a_file_is_for_one_model_one_method_and_one_format():
    names = {
        fits.fit_name(digest * 8, method, fmt)
        for digest in ("ab12ab12", "cd34cd34")
        for method in ("rtn", "paper")
        for fmt in ("c4r4", "c2r4")
    }
    assert len(names) == 8
    assert all(Path(name).name == name and name.endswith(".safetensors") for name in names)


def test_a_packaged_fit_is_found_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fits.resources, "files", lambda package: tmp_path)
    digest = 4 * "0123456789abcdef"
    assert fits.packaged_fit(digest, "paper", "c4r4") is None
    folder = tmp_path / "assets" / "fits"
    folder.mkdir(parents=True)
    transform = random_transform(8, 4, 0)
    (folder / fits.fit_name(digest, "paper", "c4r4")).write_bytes(
        transforms_to_bytes({"model.layers.0.self_attn": transform})
    )
    found = fits.packaged_fit(digest, "paper", "c4r4")
    assert found is not None
    (rotation,) = (t.content.rotation_RR for t in found.values())
    assert torch.allclose(rotation, transform.content.rotation_RR, atol=1e-6)
    assert fits.packaged_fit(digest[1:], "paper", "c4r4") is None


def test_packaged_fits_belong_to_the_packaged_model():
    """Every file that ships is for the model that ships, and has a transform for every layer."""
    digest = open_source("nano").digest()
    folder = Path(fits.__file__).parent / "assets" / "fits"
    for path in folder.glob("*.safetensors"):
        start, method, fmt = path.stem.split("-")
        assert digest.startswith(start)
        found = fits.packaged_fit(digest, method, fmt)
        assert found is not None
        assert len(found) == 8
