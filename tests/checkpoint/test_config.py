"""Values of config.json that their keys cannot have, each in one sentence."""

import json
from pathlib import Path

import pytest
from configs import DEEPSEEK_R1, DEEPSEEK_V2_LITE, KIMI_LINEAR, LONGCAT_FLASH

from quantmla.checkpoint.config import INNER, RULES, check_config
from quantmla.checkpoint.locate import read_config
from quantmla.cli import main
from quantmla.errors import QuantMLAError

NO_COUNTS = [-1, True, 1.5, "1", [1], {}, 2**31]
COUNTS = {
    "num_hidden_layers": 1,
    "num_layers": 1,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 0,
    "vocab_size": 1,
    "max_position_embeddings": 1,
}


@pytest.mark.parametrize("config", [DEEPSEEK_R1, DEEPSEEK_V2_LITE, KIMI_LINEAR, LONGCAT_FLASH])
def test_published_configs_pass(config):
    check_config(config, "config.json")
    check_config({"text_config": config}, "config.json")
    check_config(dict.fromkeys((*RULES, *INNER)), "config.json")


@pytest.mark.parametrize("key", COUNTS)
def test_counts_are_whole_numbers(key: str):
    least = COUNTS[key]
    for value in (least, 7):
        check_config({key: value}, "config.json")
    # how many layers are too many is the adapter's to say
    allowed = [2**31] if key in ("num_hidden_layers", "num_layers") else []
    for value in (x for x in (*NO_COUNTS, least - 1) if x not in allowed):
        for config in ({key: value}, {"text_config": {key: value}}):
            with pytest.raises(QuantMLAError) as caught:
                check_config(config, "config.json")
            assert f"gives {key} = {value!r}, which is not a whole number of at least {least}" in (
                str(caught.value)
            )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": [5]}, r"architectures = \[5\], which is not a list of strings"),
        ({"rope_interleave": "false"}, "rope_interleave = 'false', which is not true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1, which is not true or false"),
        ({"quantization_config": {"weight_block_size": [0, 128]}}, "two whole numbers of at leas"),
        ({"quantization_config": {"weight_block_size": [128]}}, "two whole numbers of at least 1"),
        ({"quantization_config": {"weight_block_size": "ab"}}, "two whole numbers of at least 1"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "quantization_config.quant_method"),
        ({"quantization_config": {"scale_fmt": 8}}, "scale_fmt = 8, which is not a string"),
        ({"linear_attn_config": {"full_attn_layers": [0]}}, "different whole numbers of at least"),
        ({"linear_attn_config": {"full_attn_layers": [1, 1]}}, "different whole numbers of at le"),
        ({"rope_scaling": {"factor": -1}}, "rope_scaling.factor = -1, which is not a number abov"),
        ({"rope_scaling": {"factor": 10**400}}, "factor = about 10.400, which is not a number"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type = .*, which is not a string"),
        ({"rope_parameters": {"mscale_all_dim": "1"}}, "mscale_all_dim = '1', which is not a num"),
    ],
)
def test_other_values(config, words: str, tmp_path: Path):
    for whole in (config, {"text_config": config}):
        (tmp_path / "config.json").write_text(json.dumps(whole))
        with pytest.raises(QuantMLAError, match=words):
            read_config(tmp_path)


def test_inspect_refuses_a_negative_number_of_layers(tmp_path: Path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_R1 | {"num_nextn_predict_layers": -1}))
    assert main(["inspect", str(path)]) == 1
    said = capsys.readouterr().err
    assert "num_nextn_predict_layers = -1, which is not a whole number of at least 0" in said
    assert said.count("\n") == 1
