"""The jobs of the serving benchmark: what is asked, and how much cache there is for it.

A pool is given as tokens of the unquantised cache, so that every variant gets the same bytes.
"""

from dataclasses import dataclass, replace

import numpy as np

BF16_ROW = 1152  # bytes of a token and layer, 512 + 64 channels
LAYERS = 27  # DeepSeek-V2-Lite's
VOCABULARY = 100_000
VARIANTS = ("bf16", "c4r4", "c2r4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Requests that are all there at once, or chats whose next turn follows the last answer."""

    name: str
    requests: int  # or chats
    prompt: int  # tokens of a request, or of a turn's question
    output: int  # tokens
    pool_tokens: int | None  # bf16 tokens that the pool holds; None: plenty
    turns: int = 1
    shared: int = 0  # tokens that all chats begin with
    prefix_caching: bool = False
    rehearsals: int = 0  # unmeasured runs before an engine's first one
    repeats: int = 3
    must: bool = False  # what the others are less important than

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.shared + self.turns * (self.prompt + self.output)

    @property
    def demand(self) -> int:
        """Tokens of all sequences at their ends, and 128 more of each; what is shared once."""
        return self.shared + self.requests * (self.longest - self.shared + 128)

    def pool_bytes(self, layers: int) -> int | None:
        return None if self.pool_tokens is None else self.pool_tokens * BF16_ROW * layers

    def questions(self, repeat: int) -> list[list[list[int]]]:
        """Token ids of every chat's questions; the first one begins with what is shared."""
        random = np.random.default_rng([repeat, *self.name.encode()])

        def tokens(count: int) -> list[int]:
            return random.integers(10, VOCABULARY, count).tolist()

        shared = tokens(self.shared)
        return [
            [(shared if turn == 0 else []) + tokens(self.prompt) for turn in range(self.turns)]
            for _ in range(self.requests)
        ]


def long_context(name: str, pool: float, must: bool = False) -> Job:
    """5 x (131,072 + 1,024) with memory for `pool` such requests."""
    size = 131_072 + 1024
    return Job(
        name=name,
        requests=5,
        prompt=131_072,
        output=1024,
        pool_tokens=int(pool * size),
        must=must,
    )


def one_at_a_time(requests: int, must: bool = False) -> Job:
    """A pool of two prompts or more would admit two requests and then preempt one of them."""
    return Job(
        name=f"{requests} x (16K + 2K), pool of 1.77",
        requests=requests,
        prompt=16_384,
        output=2048,
        pool_tokens=int(1.77 * 18_432),
        must=must,
    )


# Most important first in each group.
DECODE = (
    one_at_a_time(6, must=True),
    Job(
        name="32 x (2K + 512), plenty",
        requests=32,
        prompt=2048,
        output=512,
        pool_tokens=None,
        rehearsals=2,
        repeats=9,
        must=True,
    ),
    Job(
        name="8 x (32K + 512), plenty",
        requests=8,
        prompt=32_768,
        output=512,
        pool_tokens=None,
        rehearsals=1,
    ),
    Job(
        name="32 questions on 32K, plenty",
        requests=32,
        prompt=128,
        output=512,
        shared=32_768,
        pool_tokens=None,
        prefix_caching=True,
        rehearsals=1,
    ),
)
PRESSURE = (
    Job(
        name="24 chats, 4 turns",
        requests=24,
        prompt=1024,
        output=256,
        turns=4,
        shared=4096,
        pool_tokens=4096 + 24 * 5120 * 2 // 5,
        prefix_caching=True,
    ),
    Job(
        name="64 x (4K + 2K)", requests=64, prompt=4096, output=2048, pool_tokens=64 * 6144 * 2 // 3
    ),
    one_at_a_time(9),  # ten would not fit C2R4 to their end
    long_context("5 x (128K + 1K), pool of 1", 1.01),
    long_context("5 x (128K + 1K), pool of 1.5", 1.5),
)
# Pools of 10 GiB and more with all layers. The paper's sizing: 0.4 % less than the demand.
LARGE = (
    long_context("5 x (128K + 1K), 0.4 % short", 5 * 0.996, must=True),
    Job(
        name="32 x (32K + 2K)",
        requests=32,
        prompt=32_768,
        output=2048,
        pool_tokens=32 * 34_816 // 3,
    ),
    long_context("5 x (128K + 1K), pool of 3", 3.0),
    long_context("5 x (128K + 1K), pool of 6", 6.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Jobs that one engine runs, most important first."""

    name: str
    jobs: tuple[Job, ...]
    layers: int = LAYERS
    side_by_side: int = len(VARIANTS)  # engines that a GPU of 141 GB holds

    @property
    def cache_bytes(self) -> int:
        """Enough for every job, and 5 % more where there is to be plenty."""
        row = BF16_ROW * self.layers
        plenty = (job.demand * row * 21 // 20 for job in self.jobs)
        sizes = (job.pool_bytes(self.layers) for job in self.jobs)
        return max(size or most for size, most in zip(sizes, plenty, strict=True)) + 2**28


GROUPS = (
    Group(name="decode", jobs=DECODE),
    Group(name="pressure", jobs=PRESSURE),
    Group(name="large", jobs=LARGE, side_by_side=2),
)


def rank(job: Job, variant: str, repeat: int) -> tuple[int, ...]:
    """Its place in a run: musts first, then a first row of everything, then other repeats.

    Variants that run side by side take turns: what changes on the host is then in all of them.
    """
    tier = (0 if job.must else 2) + (repeat > 0)
    order = [each for group in GROUPS for each in group.jobs]
    return tier, repeat, order.index(job), VARIANTS.index(variant)


def smaller(job: Job, factor: int) -> Job:
    """The same job with everything `factor` times smaller, to try the machinery."""
    return replace(
        job,
        prompt=max(1, job.prompt // factor),
        output=max(2, job.output // factor),
        shared=job.shared // factor,
        pool_tokens=None if job.pool_tokens is None else max(1, job.pool_tokens // factor),
    )


def warm_ups(group: Group) -> list[Job]:
    """What compiles everything on first use: each job's batch, and two of the longest prompts."""
    each = [
        replace(job, prompt=min(job.prompt, 9000 // job.requests + 64), output=4, turns=1)
        for job in group.jobs
    ]
    longest = max(group.jobs, key=lambda job: job.prompt)
    return [*each, replace(longest, requests=2, output=4)]
