"""The same tokens, in the same steps, by transformers with QuantMLACache.

A step of a few tokens (`short_chunk`) reads the cache as decode does in the engine: after its own
tokens are cached, packed up to the border that the last of them sees. One of a few times as many
(`divided_chunk`) does so in pieces, as if each was a step. Here they do the same. Of a
step whose last tokens are cut off, because another request reused the first ones only, those left
end on a page border h, and the step ended less than a page after h: from there on to h + 63 the
border of what is packed is the same. A long step that is cut to a few tokens was a prefill and
stays one, so steps know how long they were.

Two cases are read a little differently by the engine, on purpose (`READ_OTHERWISE`): there, what
quantising itself changes is allowed on top of rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from quantmla.checkpoint.locate import locate
from quantmla.serve.transformers import QuantMLACache, QuantMLALayer
from quantmla.serve.vllm.pool import divided_chunk, short_chunk

# Of what rounding does to transformers' own bfloat16. The worst token is a single draw on both
# sides, and two draws of one size differ more than two means over many tokens.
RMS_FACTOR, WORST_FACTOR = 2, 4
READ_OTHERWISE = {
    "drafts": "pages are packed by the length with drafts, up to 15 tokens earlier",
    "shared prefix, shortened hit": "its first 128 new tokens find no window",
}

Request = Mapping[str, Any]


class Step(NamedTuple):
    """Tokens that were computed together."""

    start: int
    size: int
    whole: int  # as the engine computed it, with tokens that are not of the request in the end


class Pass(NamedTuple):
    """Steps from an empty cache, and from which token on they gave the request's answer."""

    steps: list[Step]
    begin: int


def passes(requests: Sequence[Request], index: int) -> list[Pass]:
    """How a request was computed: once, and once more after each time it was preempted.

    A step that begins where none of its own ended began with tokens from the cache: of what the
    request had computed before, or of an earlier request with the same tokens.
    """
    request = requests[index]
    tokens = request["prompt"] + request["answer"]
    found = [Pass([], 0)]
    for start, count in request["steps"]:
        steps = found[-1].steps
        at = sum(step.size for step in steps)
        if start > at:
            steps = _of_another(requests[:index], tokens[:start])
        if steps and start <= steps[-1].start:  # before the last step: not drafts that were refused
            found.append(Pass(truncated(steps, start), at))
        else:
            found[-1] = found[-1]._replace(steps=truncated(steps, start))
        found[-1].steps.append(Step(start, count, count))
    last = found[-1]
    return [*found[:-1], last._replace(steps=truncated(last.steps, len(tokens) - 1))]


def history(requests: Sequence[Request], index: int) -> list[Step]:
    """Steps that computed what the cache holds of the request at its end."""
    return passes(requests, index)[-1].steps


def truncated(steps: Sequence[Step], length: int) -> list[Step]:
    """The steps that computed the first `length` tokens."""
    return [
        step._replace(size=min(step.size, length - step.start))
        for step in steps
        if step.start < length
    ]


def _of_another(earlier: Sequence[Request], tokens: list[int]) -> list[Step]:
    for i in range(len(earlier) - 1, -1, -1):
        known = earlier[i]["prompt"] + earlier[i]["answer"][:-1]
        if known[: len(tokens)] == tokens:
            return history(earlier, i)
    raise ValueError(f"no earlier request computed the {len(tokens)} tokens that were reused")


@torch.inference_mode()
def log_probabilities(
    model: Any, request: Request, computed: Sequence[Pass], *, packed: bool = True
) -> Tensor:
    """Of every token that could follow, float64 [answer's tokens, vocabulary]."""
    tokens = torch.tensor([request["prompt"] + request["answer"]], device=model.device)
    first, rows = len(request["prompt"]) - 1, []
    for steps, begin in computed:
        cache = QuantMLACache.from_config(model.config) if packed else DynamicCache()
        for start, count, whole in _pieces(steps, cache):
            _read_as_engine(cache, whole)
            logits = model(tokens[:, start : start + count], past_key_values=cache).logits[0]
            rows += [logits[i] for i in range(count) if start + i >= max(first, begin)]
    return torch.stack(rows).double().log_softmax(-1).cpu()


def _pieces(steps: Sequence[Step], cache: Any) -> Iterator[Step]:
    """The steps, with those that the engine attends to in pieces divided so."""
    packed = next((layer for layer in cache.layers if isinstance(layer, QuantMLALayer)), None)
    for step in steps:
        if packed is None:
            yield step
            continue
        piece = short_chunk(packed.fmt.recent_window or 0)
        if step.whole <= piece or step.whole > divided_chunk(packed.fmt):
            yield step
            continue
        for at in range(0, step.size, piece):
            yield Step(step.start + at, min(piece, step.size - at), min(piece, step.whole - at))


def _read_as_engine(cache: Any, tokens: int) -> None:
    """The next step was one of so many tokens in the engine."""
    for layer in cache.layers:
        if isinstance(layer, QuantMLALayer):
            assert layer.fmt.recent_window is not None, "the engine serves no such format"
            short = tokens <= short_chunk(layer.fmt.recent_window)
            layer.decode_tokens = tokens if short else 0


def compare(checkpoint: str, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One line for each case: differences of log-probabilities, in nats, and of greedy tokens."""
    path, device = locate(checkpoint), "cuda" if torch.cuda.is_available() else "cpu"
    models = tuple(_model(path, dtype, device) for dtype in (torch.float32, torch.bfloat16))
    requests = found["requests"]
    cases: dict[str, list[dict[str, Tensor]]] = {}
    for i, request in enumerate(requests):
        line = differences(models, request, passes(requests, i))
        cases.setdefault(request["case"], []).append(line)
    plain = [line for case, lines in cases.items() if case not in READ_OTHERWISE for line in lines]
    for case, lines in cases.items():
        together = _together(lines, lines if case in READ_OTHERWISE else plain)
        line = {"case": case, "requests": len(lines), **together}
        yield line | {"fault": fault(line)}


def differences(
    models: tuple[Any, Any], request: Request, computed: Sequence[Pass]
) -> dict[str, Tensor]:
    """Of one request, by token of its answer; `models` are in float32 and in bfloat16."""
    exact, rounded = (log_probabilities(model, request, computed) for model in models)
    answer = torch.tensor(request["answer"])[:, None]
    wanted = exact.gather(1, answer)[:, 0]
    served = torch.tensor(request["logprobs"], dtype=torch.float64)
    found = {
        "engine": (served - wanted).abs(),
        "rounding": (rounded.gather(1, answer)[:, 0] - wanted).abs(),
        "lead": exact.amax(1) - wanted,  # 0 where the answer is the reference's own
    }
    if request["case"] in READ_OTHERWISE:
        plain = log_probabilities(models[0], request, computed, packed=False)
        found["rounding"] += (plain.gather(1, answer)[:, 0] - wanted).abs()
    return found


def _together(
    lines: Sequence[Mapping[str, Tensor]], rounded: Sequence[Mapping[str, Tensor]]
) -> dict[str, Any]:
    """A case in numbers; what is allowed comes from the rounding seen in all of `rounded`."""
    engine, lead = (torch.cat([line[name] for line in lines]) for name in ("engine", "lead"))
    rounding = torch.cat([line["rounding"] for line in rounded])
    return {
        "tokens": len(lead),
        "other_tokens": int((lead > 0).sum()),
        "largest_lead": round(float(lead.max()), 5),
        "rms": round(float(engine.square().mean().sqrt()), 5),
        "rms_allowed": round(RMS_FACTOR * float(rounding.square().mean().sqrt()), 5),
        "worst": round(float(engine.max()), 5),
        "worst_allowed": round(WORST_FACTOR * float(rounding.max()), 5),
    }


def fault(line: Mapping[str, Any]) -> str | None:
    """What is wrong with a case, or None."""
    for name in ("rms", "worst"):
        if not line[name] <= line[f"{name}_allowed"]:  # NaN is a fault, too
            return f"{name} {line[name]} is more than {line[f'{name}_allowed']}"
    if not line["largest_lead"] <= line["worst_allowed"]:
        return f"a token was chosen that is {line['largest_lead']} less likely than another"
    return None


def _model(path: Path, dtype: torch.dtype, device: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(device).eval()
