"""One task through one variant: lm-eval's requests, answers and per-item scores."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quantmla.tasks.build import Built, quiet, silent
from quantmla.tasks.registry import TaskSpec

FEWSHOT_SEED = 1234  # lm-eval's default
GREEDY = {"do_sample": False, "temperature": 0.0}  # where a task is silent, vLLM would sample
Item = dict[str, Any]


def chosen_items(sizes: Mapping[str, int], limit: int | None) -> dict[str, list[int]]:
    """Which items of each part: at most `limit` in all, taken from the parts in turn."""
    taken: dict[str, list[int]] = {name: [] for name in sizes}
    room = sum(sizes.values()) if limit is None else limit
    for index in range(max(sizes.values())):
        for name, size in sizes.items():
            if index < size and room > 0:
                taken[name].append(index)
                room -= 1
    return {name: indices for name, indices in taken.items() if indices}


def uses_chat(built: Built, tokenizer: Any) -> bool:
    """Whether prompts go through the model's chat template."""
    return built.asked.spec.chat and getattr(tokenizer, "chat_template", None) is not None


class Amount(NamedTuple):
    """How much of a task; None is all of it."""

    limit: int | None = None  # items
    max_new_tokens: int | None = None

    def new_tokens(self, spec: TaskSpec, positions: int) -> int | None:
        """Most new tokens of an answer, at most half of the model's positions."""
        if spec.max_new_tokens is None:
            return None
        most = min(spec.max_new_tokens, positions // 2)
        return most if self.max_new_tokens is None else min(most, self.max_new_tokens)


def score_items(built: Built, lm: Any, tokenizer: Any, amount: Amount) -> list[Item]:
    """Every chosen item with its score under the task's metric, and what was answered."""
    chosen = chosen_items(built.sizes, amount.limit)
    most = amount.new_tokens(built.asked.spec, lm.max_length)
    requests = []
    for name, indices in chosen.items():
        requests += _requests(built.parts[name], indices, lm, uses_chat(built, tokenizer))
    if most is not None:
        for request in requests:
            prompt, options = request.arguments
            request.arguments = (prompt, {**options, **GREEDY, "max_gen_toks": most})
    with quiet():
        answers = getattr(lm, requests[0].request_type)(requests)
    for request, answer in zip(requests, answers, strict=True):
        request.resps = [answer]
    return [item for name, indices in chosen.items() for item in _scored(built, name, indices)]


def _requests(task: Any, indices: Sequence[int], lm: Any, chat: bool) -> list[Any]:
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    with silent():
        task.build_all_requests(
            samples=set(indices),
            apply_chat_template=chat,
            chat_template=lm.apply_chat_template if chat else None,
        )
    requests: list[Any] = task.instances
    return requests


def _scored(built: Built, name: str, indices: Sequence[int]) -> list[Item]:
    task, spec = built.parts[name], built.asked.spec
    task.apply_filters()
    by_doc: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_doc.setdefault(instance.doc_id, []).append(instance)
    items: list[Item] = []
    for at, (doc_id, doc) in enumerate(task.doc_iterator(samples=set(indices))):
        instances = sorted(by_doc[doc_id], key=lambda instance: instance.idx)
        filtered = [instance.filtered_resps[spec.filter] for instance in instances]
        scores = task.process_results(doc, filtered)
        items.append(
            {
                "item": f"{name}/{indices[at]}" if len(built.parts) > 1 else str(indices[at]),
                "score": float(scores[spec.metric]),
                "answer": [instance.resps[0] for instance in instances],
            }
        )
    return items
