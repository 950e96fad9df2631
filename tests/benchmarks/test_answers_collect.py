"""The cases of vLLM's answers, without an engine: what is asked."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vllm is not installed")


@pytest.fixture
def collect():
    import answers_collect

    return answers_collect


def test_the_cases_ask_for_what_the_text_has(collect):
    class Served:
        preemptions = 0
        scheduler = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(
                coordinator=SimpleNamespace(
                    single_type_managers=[None, SimpleNamespace(block_size=16)]
                )
            )
        )

        def limit(self, blocks):
            pass

        def answer(self, case, asks, chunk=0):
            self.preemptions += case == "preempted"
            return [
                collect.Answer(case, a.name, a.prompt, [0] * a.output, steps=[(64, 1)])
                for a in asks
            ]

    text = list(range(20_000))
    found = [answer for case in collect.every_case(Served(), text) for answer in case]
    assert len(found) == 27
    assert len({answer.name for answer in found}) == 27
    by_name = {answer.name: answer.prompt for answer in found}
    assert [len(by_name[f"ragged{n}"]) for n in (5, 1500)] == [5, 1500]
    assert by_name["shared512.0"][:512] == by_name["shared512.2"][:512] == text[9000:9512]
    assert by_name["chat1.2"][: len(by_name["chat1.1"])] == by_name["chat1.1"]
