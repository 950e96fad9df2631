"""lm-eval's model of vLLM, real but for the engine under it, which answers by a script."""

import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantmla.arch import adapter_for
from quantmla.checkpoint.source import open_source
from quantmla.cli import main
from quantmla.errors import QuantMLAError
from quantmla.recipe import EvaluationRequest, TaskRequest
from quantmla.tasks import run as stage
from quantmla.tasks.model import PackedCacheLM
from quantmla.tasks.run import evaluate_tasks
from quantmla.tasks.vllm_engine import WHOLE_PROMPTS, Engines, vllm_arguments, vllm_model

ANSWER = " 3 plus 2 is 5 #### 5"
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Engine:
    """In place of LLMEngine: takes the real EngineArgs, and makes the real config of the model."""

    def __init__(self, engine_args) -> None:
        self.engine_args = engine_args
        self.model_config = engine_args.create_model_config()
        self.renderer = self.input_processor = None
        self.stopped = 0
        self.engine_core = SimpleNamespace(shutdown=self._stop)

    def _stop(self):
        self.stopped += 1

    def get_supported_tasks(self):
        return ("generate",)


@pytest.fixture
def engines(monkeypatch):
    """What each started engine was asked: (engine, prompts, sampling parameters)."""
    from vllm import LLM
    from vllm.entrypoints.llm import PoolingOfflineMixin
    from vllm.v1.engine.llm_engine import LLMEngine

    started, asked = [], []
    signature = inspect.signature(LLM.generate)

    def from_engine_args(engine_args, usage_context):
        started.append(Engine(engine_args))
        return started[-1]

    def generate(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        asked.append((self.llm_engine, given["prompts"], given["sampling_params"]))
        answer = SimpleNamespace(outputs=[SimpleNamespace(text=ANSWER)])
        return [answer] * len(given["prompts"])

    monkeypatch.setattr(LLMEngine, "from_engine_args", from_engine_args)
    monkeypatch.setattr(PoolingOfflineMixin, "__init__", lambda self: None)  # embeddings
    monkeypatch.setattr(LLM, "generate", generate)
    return started, asked


@pytest.fixture
def fused(tiny_model, short_text, tmp_path):
    """A folder that `quantize` wrote, and its base, with the tokenizer of the packaged model."""
    base, out, recipe = tmp_path / "base", tmp_path / "out", tmp_path / "recipe.yaml"
    shutil.copytree(tiny_model("deepseek_v3"), base)
    recipe.write_text("transform: {method: rtn}\n")
    argv = ["quantize", str(base), "-o", str(out), "--quiet", "--text", str(short_text)]
    assert main([*argv, "--recipe", str(recipe)]) == 0
    for folder in (base, out):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(open_source("nano").path / name, folder / name)
    return out


def test_arguments():
    sizes = {"compiled": True, "positions": 4096, "engines": 2}
    packed = vllm_arguments(Path("out"), packed=True, **sizes)
    base = vllm_arguments(Path("base"), packed=False, **sizes)
    assert {k: v for k, v in packed.items() if base.get(k) != v} == {
        "pretrained": "out",
        "attention_backend": "CUSTOM",
    }
    assert packed["gpu_memory_utilization"] + base["gpu_memory_utilization"] <= 0.9
    assert vllm_arguments(Path("x"), packed=True, **sizes | {"compiled": False})["enforce_eager"]
    longest = sizes | {"positions": WHOLE_PROMPTS}
    assert not vllm_arguments(Path("x"), packed=True, **longest)["enable_chunked_prefill"]
    longest["positions"] += 1
    assert vllm_arguments(Path("x"), packed=True, **longest)["enable_chunked_prefill"]


def test_engines_start_once_and_are_stopped(engines, fused):
    arguments = vllm_arguments(fused, packed=True, compiled=False, positions=64, engines=2)
    running = Engines()
    assert running.get("rtn", arguments) is running.get("rtn", arguments)
    running.get("bf16", arguments)
    running.stop()
    running.stop()
    started, _ = engines
    assert [engine.stopped for engine in started] == [1, 1]


def test_the_engine_gets_what_it_is_told(engines, fused):
    from vllm.config import AttentionConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    lm = vllm_model(vllm_arguments(fused, packed=True, compiled=False, positions=2048, engines=1))
    ((engine,), _) = engines
    args = engine.engine_args
    backend = AttentionConfig.validate_backend_before(args.attention_backend)
    assert backend is AttentionBackendEnum.CUSTOM
    assert args.model == str(fused)
    assert (args.dtype, args.kv_cache_dtype, args.seed) == ("bfloat16", "auto", 0)
    assert (args.enforce_eager, args.enable_prefix_caching) == (True, False)
    assert args.gpu_memory_utilization == 0.9
    assert args.enable_chunked_prefill is False
    assert lm.max_length == engine.model_config.max_model_len == 2048
    assert hasattr(engine.model_config.hf_config, "quantmla_config")


@pytest.mark.parametrize("tasks", [("gsm8k", "fda", "niah_single_2@300"), ("aime25", "math500")])
def test_written_tasks_run_through_lm_evals_model(
    engines, fused, data, tmp_path, monkeypatch, tasks
):
    template = TEMPLATE if "aime25" in tasks else None
    for folder in (fused, tmp_path / "base"):
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text()) | ({"chat_template": template} if template else {})
        path.write_text(json.dumps(config))
    monkeypatch.setattr(stage, "check_engine", lambda *_, **__: None)  # there is no GPU
    request = TaskRequest(
        evaluation=EvaluationRequest(model=str(fused), limit=2, device="cpu"),
        tasks=tasks,
        output=str(tmp_path / "run"),
        data=str(data),
        engine="vllm",
        max_new_tokens=16,
    )
    seen = []  # by our own model, which needs no engine

    def seeing(self, requests, disable_tqdm=True):
        seen.extend(self.tok_encode(request.args[0]) for request in requests)
        return [ANSWER] * len(requests)

    found = evaluate_tasks(request, progress=False)
    assert found["complete"]
    assert found["settings"]["engine"] == "vllm"
    assert {t["name"] for t in found["tasks"] if t["chat"]} == ({"aime25"} if template else set())
    assert {(r["task"], r["variant"]) for r in found["results"]} == {
        (task, variant) for task in tasks for variant in ("bf16", "rtn-fused")
    }
    started, asked = engines
    assert [e.engine_args.attention_backend for e in started] == [None, "CUSTOM"]
    assert [engine for engine, *_ in asked] == started * len(tasks)  # one start for all tasks
    assert [engine.stopped for engine in started] == [1, 1]
    for _, _, parameters in asked:
        for one in parameters:
            assert (one.temperature, one.max_tokens) == (0.0, 16)
            assert one.stop
    monkeypatch.setattr(PackedCacheLM, "generate_until", seeing)
    plain = TaskRequest(
        **{**fields(request), "engine": "transformers", "output": str(tmp_path / "o")}
    )
    again = evaluate_tasks(plain, progress=False)
    prompts = [p["prompt_token_ids"] for _, group, _ in asked for p in group]
    assert sorted(prompts) == sorted(seen)  # the same tokens, whatever the engine
    scores = [[(r["task"], r["variant"], r["score"]) for r in x["results"]] for x in (found, again)]
    assert scores[0] == scores[1]


def fields(request):
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite", "longcat_flash", "kimi_k2"])
def test_every_served_family_has_its_config_and_tokenizer(engines, tiny_model, tmp_path, family):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("deepseek_v3" if family == "kimi_k2" else family), folder)
    config = json.loads((folder / "config.json").read_text())
    if family == "kimi_k2":  # transformers has no class of that name
        config["model_type"] = family
        (folder / "config.json").write_text(json.dumps(config))
    assert adapter_for(config).model_type == family
    lm = vllm_model(vllm_arguments(folder, packed=False, compiled=True, positions=512, engines=1))
    assert lm.tok_encode("some words")


def test_an_engine_that_does_not_start_is_one_sentence(fused, monkeypatch):
    from vllm.v1.engine.llm_engine import LLMEngine

    def failing(engine_args, usage_context):
        raise RuntimeError("Engine core initialization failed.\nSee root cause above.")

    monkeypatch.setattr(LLMEngine, "from_engine_args", failing)
    with pytest.raises(
        QuantMLAError, match=r"vLLM did not start with .*out: Engine core init"
    ) as e:
        vllm_model(vllm_arguments(fused, packed=True, compiled=True, positions=64, engines=1))
    assert "\n" not in str(e.value)
