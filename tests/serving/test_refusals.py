"""What vLLM's flags cannot ask of a packed cache; `quantmla.serve.vllm` refuses the same."""

import pytest
from serving_checkpoint import MANIFEST, checkpoint

from quantmla.errors import UsageError
from quantmla.quant.format import parse_format
from quantmla.serving.command import serve_command
from quantmla.serving.refusals import FUSED_PASS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--attention-backend FLASHMLA", "--attention-backend FLASHMLA"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8: .* auto or bfloat16"),
        ("--kv_cache_dtype=fp8_e4m3", "--kv-cache-dtype fp8_e4m3"),
        ("--block-size 16", "--block-size 16: .* must be 64"),
        ("--dtype half", "--dtype half"),
        ("--decode-context-parallel-size 2", "--decode-context-parallel-size 2"),
        ("-dcp 2", "--decode-context-parallel-size 2"),
        ("-pcp=2", "--prefill-context-parallel-size 2"),
        ("--pipeline_parallel_size 2", "--pipeline-parallel-size 2: .* must be 1"),
        ("-pp 4", "--pipeline-parallel-size 4"),
        ("--ubatch-size 2", "--ubatch-size 2: .* must be 0 or 1"),
        ("--prefill-context-parallel-size=4", "--prefill-context-parallel-size 4"),
        ('--kv-transfer-config {"kv_connector":"X"}', "--kv-transfer-config"),
        ("--kv-transfer-config.kv_connector X", "--kv-transfer-config cannot be used"),
        ("--kv-offloading-size 4", "--kv-offloading-size"),
        ("--disable-hybrid-kv-cache-manager", "--disable-hybrid-kv-cache-manager"),
        ("--kv-cache-dtype-skip-layers 0", "--kv-cache-dtype-skip-layers"),
        ("--calculate-kv-scales", "--calculate-kv-scales"),
        ("--enable-dbo", "--enable-dbo"),
        ("--enable-sleep-mode", "--enable-sleep-mode"),
        ("--no-enable-dbo --enable-dbo", "--enable-dbo"),
        ("--kv-cache-dtype auto --kv-cache-dtype fp8", "--kv-cache-dtype fp8"),
        (
            "--scheduling-policy priority --no-enable-prefix-caching --enable-prefix-caching",
            "add --no-enable-prefix-caching",
        ),
        ("--scheduling-policy priority", "add --no-enable-prefix-caching"),
        ("--scheduling-policy=priority --enable-prefix-caching", "--no-enable-prefix-caching"),
        ('--speculative-config {"method":"mtp"}', "'mtp'.* as those of ngram,"),
        ("--speculative-config.method eagle3", "'eagle3'"),
        ('-sc {"model":"x/y"}', "names no method: drafts must need no cache"),
        ("--spec-tokens 3", "names no method"),
        ("-sc.method ngram -sc.num_speculative_tokens 1k", "num_speculative_tokens 1k"),
        ('-sc {"method":"ngram","num_speculative_tokens":1k}', "is not a JSON object"),
        ("--spec-method suffix", "num_speculative_tokens 24: it must be 1 to 15"),
        ("-sc.method suffix -sc.suffix_decoding_max_tree_depth 16", "num_speculative_tokens 16"),
        ("-O2.0 --attention-backend FLASHMLA", "--attention-backend FLASHMLA"),
        ("-O2.0 --enable-dbo", "--enable-dbo"),
        ("--kv-transfer-config.kv_role x --kv-transfer-config None", "in several parts"),
        ("--kv-transfer-config.kv_role kv_both --kv-transfer-config.x None", "cannot be used"),
        ("--kv-cache-dtype-skip-layers None 3", "--kv-cache-dtype-skip-layers cannot be used"),
        ("--attention-backend CUSTOM -ac.backend custom", "both given"),
        ("--model x", "--model: the model is "),
        ("--enable-dbo None", "--enable-dbo"),
        ("-ac." + ".".join("a" * 600) + " 1", "-ac is nested too deeply"),
        ("--spec-method mtp --spec-tokens 1", "'mtp'"),
        ("--spec-method ngram --spec-tokens 99", "num_speculative_tokens 99"),
        ('-sc {"method":"ngram","num-speculative-tokens":99}', "num_speculative_tokens 99"),
        (f'-sc {{"method":"ngram","num_speculative_tokens":"{"9" * 5000}"}}', "must be 1 to 15"),
        ("--speculative-config nonsense", "'nonsense' is not a JSON object"),
        ("--block-s 16", "--block-s may be --block-size: write the flag out"),
        ("--spec-t 99", "--spec-t may be --spec-tokens"),
        ("--no-enforce-e", "--no-enforce-e may be --enforce-eager"),
        ("-pc 2", "-pc may be --prefill-context-parallel-size"),
        ("-s.method mtp", "-s may be --speculative-config"),
        ("--conf x.yaml", "--conf may be --config"),
        ("--config=x.yaml", "--config=x.yaml: write --config x.yaml"),
        ("--block-size", "--block-size needs a value: .* must be 64"),
        ("--kv-cache-dtype= --port 1", "--kv-cache-dtype needs a value: .* auto or bfloat16"),
        ("--speculative-config --port 1", "--speculative-config needs a value"),
        ("--attention-config.backend FLASHMLA", "backend FLASHMLA: .* must be CUSTOM"),
        ('-ac={"backend":"TRITON_MLA"}', "--attention-config has backend TRITON_MLA"),
        ('-ac {"backend_per_kind":{"mla_attention":"FLASHMLA"}}', "backend FLASHMLA"),
        (f'--compilation_config {{"pass_config":{{"{FUSED_PASS}":true}}}}', f"{FUSED_PASS} True"),
        (f"-cc.pass_config.{FUSED_PASS}=1", f"pass_config.{FUSED_PASS} 1: it would write"),
        (
            '--speculative-config {"method":"ngram","num_speculative_tokens":16}',
            "num_speculative_tokens 16: it must be 1 to 15",
        ),
    ],
)
def test_what_cannot_hold_is_refused_by_the_name_of_its_flag(tmp_path, arguments, words):
    with pytest.raises(UsageError, match=words):
        serve_command(checkpoint(tmp_path), arguments.split(" "))


@pytest.mark.parametrize(
    "arguments",
    [
        ['--speculative-config={"method":"ngram","num_speculative_tokens":4}'],
        ["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=3"],
        ["--tensor-parallel-size", "2", "--dtype", "bfloat16", "-dcp", "1", "-pp", "1"],
        ["--no-enable-prefix-caching", "--max-num-batched-tokens", "2048"],
        ["--attention-config.backend", "auto", f"-cc.pass_config.{FUSED_PASS}=false"],
        ["-cc", "{}", "-ac", '{"backend":"AUTO"}', "--ubatch-size", "0", "--kv-transfer-config="],
        ["--kv-cache-dtype", "fp8", "--kv-cache-dtype", "auto"],  # the last one counts
        ["--enable-dbo", "--no-enable-dbo", "--kv-transfer-config", "None", "-dc", "{}"],
        ["--scheduling-policy", "priority", "--no-enable-prefix-caching"],
        ["--spec-method", "ngram", "--spec-tokens", "3", "-sc.prompt_lookup_max", "4"],
        ["--spec-model", "ngram", "--spec-tokens", "3"],
        ['--speculative-config={"method":"suffix","suffix_decoding_max_tree_depth":8}'],
        ["-O2.0", "--ubatch-size", "1", "-cc", '{"max_cudagraph_capture_size":1k}'],
        ["-sc", "", "--no-spec", "--no-kv-cache"],
        ["-sc", "null"],
        ["--spec-method", "None", "--speculative-config", "None"],
    ],
)
def test_what_can_hold_is_passed_on(tmp_path, arguments):
    assert serve_command(checkpoint(tmp_path), arguments)[-len(arguments) :] == arguments


def test_drafts_fit_into_the_recent_window(tmp_path):
    fmt = parse_format("c4r4", recent_window=8).to_json()
    out = checkpoint(tmp_path, MANIFEST | {"format": fmt})
    assert serve_command(out, ["--spec-method", "ngram", "--spec-tokens", "8"])
    with pytest.raises(UsageError, match="num_speculative_tokens 9: it must be 1 to 8"):
        serve_command(out, ["--spec-method", "ngram", "--spec-tokens", "9"])
