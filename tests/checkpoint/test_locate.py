import json
from pathlib import Path

import huggingface_hub
import pytest

from quantmla.checkpoint.locate import locate, read_config
from quantmla.errors import QuantMLAError, UsageError


def test_packaged_model_wins_over_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "nano").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("nano").parts[-3:] == ("quantmla", "assets", "nano")
    assert locate("./nano") == Path("nano")
    assert locate(tmp_path / "nano") == tmp_path / "nano"


@pytest.mark.parametrize("model", ["missing", "/no/such/folder", "./a/b", "a/b/c"])
def test_what_is_neither_folder_nor_hub_id_is_named(model: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QuantMLAError, match=r"no model at .*give a checkpoint folder, a hub id"):
        locate(model)


def test_hub_ids_go_through_the_hub_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def download(hub_id: str, **options):
        asked[hub_id] = options
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    assert locate("owner/model", "main") == tmp_path
    assert asked["owner/model"]["revision"] == "main"
    assert read_config("owner/other") == {"model_type": "deepseek_v3"}
    assert asked["owner/other"]["allow_patterns"] == ["config.json"]


def test_a_hub_that_cannot_be_reached_gives_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def fail(*args, **options):
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(QuantMLAError, match=r"no folder 'owner/model' here.*: no route to host$"):
        locate("owner/model")


def test_config_may_be_a_file_of_its_own(tmp_path: Path):
    (tmp_path / "r1.json").write_text('{"model_type": "deepseek_v3"}')
    assert read_config(tmp_path / "r1.json") == {"model_type": "deepseek_v3"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": ["a"]}', "model_type"),
        ('{"model_type": "deepseek_v3", "text_config": 5}', "text_config"),
        ('{"architectures": 5}', "architectures"),
        ('{"quantization_config": "fp8"}', "quantization_config"),
        ('{"rope_parameters": "x"}', "rope_parameters"),
        ('{"dtype": 5}', "dtype = 5, which is not a string"),
        ('{"text_config": {"num_nextn_predict_layers": "a"}}', "num_nextn_predict_layers"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_config_of_another_kind_of_value_is_one_sentence(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(QuantMLAError, match=words):
        read_config(tmp_path)


@pytest.mark.parametrize("model", ["nano", "."])
def test_only_a_hub_id_has_revisions(model: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"revision 'main' is of a hub id, and '{model}' is on"):
        locate(model, "main")
