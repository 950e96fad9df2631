"""Runs the Triton kernels in the interpreter (a process with TRITON_INTERPRET=1) and checks them.

Prints one line per check. bf16 is cut off, not rounded, there: outputs are taken in float32, and
gathered rows are compared with rows that are cut off too.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from cases import SMALL, Case, all_tokens, build, empty_cache, random_rows  # noqa: E402
from compare import check  # noqa: E402

from quantmla.kernels import reference  # noqa: E402
from quantmla.kernels.problem import Tokens  # noqa: E402
from quantmla.kernels.triton.launches import append_launch, decode_launches, gather_launch  # noqa: E402
from quantmla.kernels.triton.schedule import Device, schedule  # noqa: E402
from quantmla.mla.partial import Partial  # noqa: E402


def decode(case: Case, num_splits: int | None = None, step: int | None = None) -> None:
    query, view = build(case)
    batch, query_len, heads, _ = query.latent_BSNR.shape
    device = Device(4, 227 << 10)
    width = view.block_table_BJ.shape[1]
    plan = schedule(batch, query_len * heads, width, device, num_splits or case.num_splits)
    if step is not None:
        plan = plan._replace(step=step)
    launches, result = decode_launches(query, view, plan, (False, False))
    exact = torch.empty(result.out_BSNR.shape)
    launches[0].run()
    replace(launches[1], args={**launches[1].args, "out": exact}).run()
    print("decode", case.name, plan, check(Partial(exact, result.lse_BSN), query, view))


def append(case: Case) -> None:
    """Bytes equal those of the reference, whether rows come at once or in three calls."""
    generator = torch.Generator().manual_seed(1)
    view = empty_cache(case, generator)
    tokens = all_tokens(case.lengths)
    rows = random_rows(len(tokens.position_T), case, generator)
    wanted = replace(
        view, pages_JY=view.pages_JY.clone(), window_pages_JMC=view.window_pages_JMC.clone()
    )
    reference.append(rows, tokens, wanted)
    for part in (slice(0, -100), slice(-100, -37), slice(-37, None)):
        launch = append_launch(
            type(rows)(*(x[part] for x in rows)), Tokens(*(x[part] for x in tokens)), view
        )
        launch.run()
    assert torch.equal(view.pages_JY, wanted.pages_JY), "pages differ"
    bits = [v.window_pages_JMC.view(torch.int16) for v in (view, wanted)]
    assert torch.equal(*bits), "windows differ"
    print("append", case.name)


def gather(case: Case) -> None:
    _, view = build(case)
    tokens = all_tokens(case.lengths)
    tokens.sequence_T[::7] = -1
    out = torch.full((len(tokens.sequence_T), case.rank + case.rope), 7.0, dtype=torch.bfloat16)
    gather_launch(tokens, view, out).run()
    real = tokens.sequence_T >= 0
    wanted = reference.read_rows(Tokens(*(x[real] for x in tokens)), view)
    cut = (wanted.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(out[real].float(), cut), "gathered rows differ"
    assert (out[~real] == 7).all(), "padding was written"
    print("gather", case.name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for small in SMALL:
        decode(small)
    decode(SMALL[0], num_splits=3, step=2)
    whole = Case(name="whole", rank=128, rope=32, lengths=(130, 200), window_page=16)
    append(whole)
    append(replace(whole, fmt="c2r4", rope=64, lengths=(20, 140), row_scale=1e-3))
    gather(SMALL[0])
    gather(SMALL[3])
