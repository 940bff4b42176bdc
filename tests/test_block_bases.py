"""Block-diffusion bases: their law by enumeration, the mask, and a cache that changes nothing."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM, Qwen3ForCausalLM

from adjust_dlm.bases.blocks import to_edge
from adjust_dlm.bases.check import check_base
from adjust_dlm.bases.exact import ExactBase
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.bench.clock import Ceilings
from adjust_dlm.bench.measure import Bench, Cell, eager_parts, half_filled
from adjust_dlm.bench.runtime import RuntimeConfig, make_runtime
from adjust_dlm.bench.shapes import random_base, random_sampler
from adjust_dlm.decoders import DECODERS, Canvas, decode, make_plan, read_variant
from adjust_dlm.decoders.divergence import observe
from adjust_dlm.decoders.machinery.cache import with_cache
from adjust_dlm.decoders.machinery.canvas import Picks
from adjust_dlm.decoders.machinery.rows import RoundCanvas, before, join, take
from adjust_dlm.exported import export, generate_with
from adjust_dlm.sampler import Sampler, SamplerConfig, load_sampler
from adjust_dlm.serve.engine import Engine, Limits
from adjust_dlm.serve.work import Progress
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import (
    BOS,
    FAMILIES,
    MASK,
    ROOT,
    Law,
    assert_law,
    distance,
    left_pad,
    oracle,
    tiny_base,
    tiny_config,
    tiny_sampler,
)
from serving import play, submit, work_of
from tiny_ar import BOS as AR_BOS
from tiny_ar import chat_base, tiny_partner

WORDS, LENGTH = 3, 4
N = 20_000
NO_END = (23,)
adjust_module = importlib.import_module("adjust_dlm.decoders.adjust")
edlm_module = importlib.import_module("adjust_dlm.decoders.edlm")


def table(seed: int = 3) -> Tensor:
    return torch.rand((WORDS,) * LENGTH, generator=torch.Generator().manual_seed(seed)).pow(4) + 0.05


def block_base(size: int, shifted: bool) -> ExactBase:
    return ExactBase(table(), block=size, shifted=shifted)


def law(first: int | None) -> Law:
    """The table, given its first token if there is one."""
    p = table().double()
    strings = itertools.product(range(WORDS), repeat=LENGTH)
    mass = {s: float(p[s]) for s in strings if first is None or s[0] == first}
    return {s: q / sum(mass.values()) for s, q in mass.items()}


# The law -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "shifted", "decoder", "k"),
    [
        (size, shifted, "joint" if k == 1 else "adjust", k)
        for size, shifted in [(1, False), (2, False), (4, False), (2, True), (4, True)]
        for k in range(1, min(size + 1, 4) + 1)  # a round ends with its block: a larger k is the same decode
    ],
)
def test_joint_decoding_and_adjust_with_an_oracle_follow_the_law(
    size: int, shifted: bool, decoder: str, k: int
) -> None:
    base, first = block_base(size, shifted), 1 if shifted else None
    prompt = [] if first is None else [first]
    config = DecodeConfig(tokens_per_step=k, max_new_tokens=LENGTH - len(prompt), order="entropy", seed=k)
    helper = oracle(base) if decoder == "adjust" else None
    result = decode(base, [prompt] * N, config, decoder=decoder, sampler=helper)
    assert_law(result.tokens_BL, law(first))
    blocks = [range(i, min(i + size, LENGTH)) for i in range(0, LENGTH, size)]
    for left, right in itertools.pairwise(blocks):
        assert int(result.order_BL[:, list(left)].max(-1).values.max()) < LENGTH
        assert bool((result.order_BL[:, list(left)].amax(-1) < result.order_BL[:, list(right)].amin(-1)).all())
    if shifted:  # a block's first position goes first
        for block in blocks[1:]:
            assert bool((result.order_BL[:, block.start] == result.order_BL[:, list(block)].amin(-1)).all())
    rounds = sum(-(-len([i for i in block if i >= len(prompt)]) // k) for block in blocks)
    assert set(result.base_calls_B.tolist()) == {rounds}  # a round ends with its block


def test_a_blocks_first_position_committed_late_changes_the_law_of_a_shifted_base(monkeypatch: Any) -> None:
    """Blocks of 2 with the first token given: x_2 is drawn from p(x_2 | x_0 x_1) whatever x_3 already is."""
    base = block_base(2, True)
    monkeypatch.setattr(Canvas, "lead", lambda canvas, score_BL: score_BL)
    config = DecodeConfig(max_new_tokens=3, order="left_to_right", seed=1)
    assert_law(decode(base, [[1]] * N, config, decoder="joint").tokens_BL, law(1))
    monkeypatch.setattr(
        Canvas, "lead", lambda canvas, score_BL: score_BL.copy_(score_BL.where(score_BL.isinf(), -score_BL))
    )
    late = decode(base, [[1]] * N, config, decoder="joint")
    assert bool((late.order_BL[:, 3] < late.order_BL[:, 2]).all())
    p, own = law(1), dict[tuple[int, ...], float]()
    for s in p:
        x1 = sum(q for t, q in p.items() if t[:2] == s[:2])
        x2 = sum(q for t, q in p.items() if t[:3] == s[:3]) / x1
        x3 = sum(q for t, q in p.items() if (t[1], t[3]) == (s[1], s[3])) / x1
        own[s] = x1 * x3 * x2
    assert distance(own, p) > 0.03
    assert_law(late.tokens_BL, own)


@pytest.mark.parametrize(("size", "shifted"), [(2, False), (2, True), (4, True)])
def test_divergence_is_zero_for_joint_and_oracle_and_as_enumerated_for_parallel(size: int, shifted: bool) -> None:
    base, first = block_base(size, shifted), 1 if shifted else None
    prompt = [] if first is None else [first]
    new = LENGTH - len(prompt)
    config = DecodeConfig(tokens_per_step=2, max_new_tokens=new, order="left_to_right")
    exact = observe(base, [prompt] * 300, config.but(tokens_per_step=1), decoder="joint")
    assert float(exact.value_BTM[..., :2].abs().max()) < 1e-6
    exact = observe(base, [prompt] * 300, config, decoder="adjust", sampler=oracle(base))
    assert float(exact.value_BTM[..., :2].abs().max()) < 1e-6
    p, q = law(first), dict[tuple[int, ...], float]()
    # Rounds of two within a block: of a block of 2 that has one open position, one.
    rounds = [[i for i in range(a, min(a + size, LENGTH)) if i >= len(prompt)] for a in range(0, LENGTH, size)]
    rounds = [block[i : i + 2] for block in rounds for i in range(0, len(block), 2)]
    for s in p:
        q[s] = 1.0
        for positions in rounds:
            seen = range(positions[0])
            before = [t for t in p if all(t[i] == s[i] for i in seen)]
            mass = sum(p[t] for t in before)
            for i in positions:
                q[s] *= sum(p[t] for t in before if t[i] == s[i]) / mass
    assert sum(q.values()) == pytest.approx(1)
    wanted = sum(q[s] * math.log(q[s] / p[s]) for s in p)
    told = observe(base, [prompt] * N, config, decoder="parallel").summary()
    assert wanted > 0.01
    assert abs(told["kl_qp"] * new - wanted) < 1.5 * told["kl_qp_ci95"] * new


# The mask, and the frame ---------------------------------------------------------------------------------------


def longhand(base: TransformerBase, row: list[int], size: int) -> Tensor:
    """States [L, D] of a row, block by block: a pass over the text up to a block's edge, of which that block counts.

    In such a pass earlier blocks see nothing behind them either, which a pass without blocks of the same weights, over
    all blocks up to theirs, gives for the first block alone; so keys and values are those of this very rule.
    """
    whole = [*row, *[MASK] * (-len(row) % size)]
    out = [base.hidden(left_pad([whole[:end]]))[0, end - size :] for end in range(size, len(whole) + 1, size)]
    return torch.cat(out)[: len(row)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_states_depend_on_nothing_right_of_a_block(family: str, size: int) -> None:
    base = tiny_base(family, block=size)
    row = torch.randint(3, 20, (27,), generator=torch.Generator().manual_seed(size)).tolist()
    h_LD = base.hidden(left_pad([row]))[0]
    torch.testing.assert_close(h_LD, longhand(base, row, size), rtol=0, atol=2e-5)
    for edge in range(size, len(row), size):
        junk = [*row[:edge], *[5] * (len(row) - edge)]
        assert torch.equal(base.hidden(left_pad([junk]))[0, :edge], h_LD[:edge])
    inside = [*row[: size - 1], 3 if row[size - 1] != 3 else 4, *row[size:]]  # a block's last token
    assert float((base.hidden(left_pad([inside]))[0, 0] - h_LD[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_one_block_over_all_is_the_whole_canvas(family: str) -> None:
    """And the last block's masks beyond the canvas are masks."""
    base, plain = tiny_base(family, block=32), tiny_base(family)
    row = [BOS, 5, 6, MASK, 7]
    whole = plain.hidden(left_pad([[*row, *[MASK] * 27]]))[0]
    own = base.hidden(left_pad([row]))
    torch.testing.assert_close(base.by_position(own, left_pad([row]))[0], whole[:5])


@pytest.mark.parametrize("family", FAMILIES)
def test_left_pads_change_nothing(family: str) -> None:
    base = tiny_base(family, block=4)
    rows = [[BOS, 5, 6, MASK, 7, 8, MASK], [BOS, 9], [BOS, 4, 5, 6, 7, 8, 9, 10, MASK]]
    together = base.hidden(left_pad(rows))
    for row, h_LD in zip(rows, together, strict=True):
        torch.testing.assert_close(h_LD[-len(row) :], base.hidden(left_pad([row]))[0])


def test_positions_are_scored_by_the_column_before_in_a_shifted_family_alone() -> None:
    rows = [[BOS, 5, 6, MASK, 7], [BOS, MASK]]
    state, at = left_pad(rows), (torch.tensor([0, 0, 1, 1]), torch.tensor([0, 4, 3, 4]))
    h_BLD = torch.arange(10.0).view(2, 5, 1)
    assert tiny_base("dream", block=4).at(h_BLD, state, *at)[:, 0].tolist() == [0, 3, 8, 8]
    assert tiny_base("llada", block=4).at(h_BLD, state, *at)[:, 0].tolist() == [0, 4, 8, 9]
    assert tiny_base("dream").at(h_BLD, state, *at)[:, 0].tolist() == [0, 4, 8, 9]  # its states were moved


def table_of_decoders() -> dict[tuple[str, str], str]:
    """(decoder, kind of base) -> what docs/models.md says of it."""
    text = (ROOT / "docs/models.md").read_text().partition("## Decoders and kinds of bases")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line[:1] == "|"]
    head, _, *lines = [[cell.strip() for cell in row] for row in rows]
    return {(line[0].strip("`"), kind): said for line in lines for kind, said in zip(head[1:], line[1:], strict=True)}


KINDS: dict[str, tuple[str, int | None]] = {
    "whole canvas": ("llada", None), "whole canvas, shifted": ("dream", None), "blocks": ("llada", 4),
    "blocks, shifted": ("dream", 4),
}  # fmt: skip


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_docs_say_of_a_decoder_on_a_kind_of_base(decoder: str, kind: str) -> None:
    said, (family, size) = table_of_decoders(), KINDS[kind]
    assert said.keys() == {(name, kind) for name in DECODERS for kind in KINDS}
    base = tiny_base(family, block=size)
    order = "confidence" if decoder == "guided" else "entropy"
    config = DecodeConfig(max_new_tokens=9, tokens_per_step=2, order=order)
    helpers = {"sampler": tiny_sampler(base), "partner": tiny_partner(base)}
    if said[decoder, kind] == "refused":
        with pytest.raises(InputError, match=base.spec.name):
            decode(base, [[BOS, 5]], config, decoder=decoder, **helpers)
        return
    assert said[decoder, kind] == "yes"
    made = decode(base, [[BOS, 5], [BOS]], config, decoder=decoder, **helpers)
    assert MASK not in made.tokens_BL


# The cache -----------------------------------------------------------------------------------------------------


def prompts(size: int) -> list[list[int]]:
    """Of every length modulo S from the start token on, and one of several blocks."""
    draw = torch.Generator().manual_seed(size)
    lengths = [*range(1, size + 1), 2 * size, 2 * size + 3]
    return [[BOS, *torch.randint(3, 20, (n - 1,), generator=draw).tolist()] for n in lengths]


def played(
    base: TransformerBase, config: DecodeConfig, decoder: str, texts: list[list[int]], *, cached: bool, **more: Any
) -> Any:
    """A decode with the cache, or by passes over the whole canvas."""
    sampler = tiny_sampler(base) if DECODERS[decoder].needs_sampler else None
    with pytest.MonkeyPatch.context() as patch:
        if not cached:
            patch.setattr("adjust_dlm.decoders.with_cache", lambda base, config: base)
            patch.setattr("adjust_dlm.decoders.with_sampler_cache", lambda sampler: sampler)
        partner = tiny_partner(base) if DECODERS[decoder].needs_partner else None
        return decode(base, texts, config, decoder=decoder, sampler=sampler, partner=partner, **more)


@pytest.mark.parametrize("decoder", [name for name in DECODERS if name != "origin"])
@pytest.mark.parametrize(
    ("family", "size", "block_length", "end"),
    [("dream", 4, None, NO_END), ("llada", 4, None, NO_END), ("dream", 8, 4, (1,)), ("llada", 8, None, NO_END)],
)
def test_every_decoder_writes_the_same_with_the_cache(
    decoder: str, family: str, size: int, block_length: int | None, end: tuple[int, ...]
) -> None:
    """Rows in different blocks, left pads, early ends, sub-blocks, prompts of every length modulo S."""
    base = tiny_base(family, block=size, end_ids=end)
    order = {"guided": "confidence"}.get(decoder)
    config = DecodeConfig(
        max_new_tokens=2 * size + 3, tokens_per_step=3, block_length=block_length, seed=4, order=order
    )
    kept, plain = (played(base, config, decoder, prompts(size), cached=cached) for cached in (True, False))
    assert torch.equal(kept.tokens_BL, plain.tokens_BL)
    assert torch.equal(kept.order_BL, plain.order_BL)
    assert MASK not in kept.tokens_BL[kept.real_BL]
    grid = block_length or size
    for b in range(len(kept.tokens_BL)):
        order_L = kept.order_BL[b][kept.real_BL[b]]
        parts = [part[part >= 0] for part in order_L.split(grid)]
        parts = [part for part in parts if len(part)]
        assert all(int(left.max()) < int(right.min()) for left, right in itertools.pairwise(parts))


@pytest.mark.parametrize("size", [4, 16, 64])
@pytest.mark.parametrize("family", [*FAMILIES, "sdar"])
def test_cached_states_are_those_of_the_whole_canvas(family: str, size: int) -> None:
    base = tiny_base(family, block=size, max_position_embeddings=256, end_ids=NO_END)
    for h_RD, whole_RD in cached_and_whole(base, size):
        torch.testing.assert_close(h_RD, whole_RD, rtol=0, atol=2e-5)


def cached_and_whole(base: TransformerBase, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """After every commit, at all columns of the open block and before it; junk to the right changes nothing."""
    config = DecodeConfig(max_new_tokens=size + 5, seed=2)
    canvas = Canvas(base, prompts(min(size, 5)), config)
    cached = with_cache(base, config)
    while canvas.open:
        h_BLD, whole_BLD = cached.hidden(canvas), base.hidden(canvas)
        behind_BL = canvas.positions_BL >= canvas.memory.counts_B3[:, 2:]
        upto_BL = canvas.real_BL & ~behind_BL & canvas.open_B[:, None]
        yield h_BLD[upto_BL], whole_BLD[upto_BL]
        assert bool((upto_BL | ~canvas.seen_BL).all())
        behind_BL = torch.nn.functional.pad(behind_BL, (0, size - 1), value=False)
        for part in canvas.memory.kept:  # keys, values and states to the right are never looked at
            part[behind_BL] = 1e3
        canvas.start_round()
        row_B = torch.arange(len(canvas.rows_B), device=base.device)
        position_B1 = canvas.open_BL.long().argmax(-1, keepdim=True)
        token_B1 = 3 + (canvas.uniforms(position_B1, row_B[:, None]) * 15).long()
        canvas.commit(Picks(position_B1, token_B1, canvas.open_B[:, None]))


def test_a_pass_computes_the_open_block_and_what_became_final() -> None:
    """Prompt of 6, S = 4, 9 new tokens: 8 columns in the first pass, then 4; in the first of a block 8."""
    base = tiny_base("dream", block=4, end_ids=NO_END)
    columns = list[int]()
    again = base.hidden_again

    def spy(state: State, memory: Any, column_BN: Tensor, valid_BN: Tensor) -> Tensor:
        columns.append(int(valid_BN.sum()))
        assert column_BN.shape == valid_BN.shape
        return again(state, memory, column_BN, valid_BN)

    base.hidden_again = spy  # type: ignore[method-assign]
    g, steps = tiny_sampler(base), list[int]()
    rows = Sampler.rows

    def spy_g(sampler: Sampler, h_BLD: Tensor, state: State, column_BN: Tensor, keys: Any, valid_BN: Tensor) -> Tensor:
        steps.append(int(valid_BN.sum()))
        return rows(sampler, h_BLD, state, column_BN, keys, valid_BN)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "rows", spy_g)
        decode(base, [[BOS, 5, 6, 7, 8, 9]], DecodeConfig(max_new_tokens=9), decoder="joint")
        assert columns == [8, 4, 8, 4, 4, 4, 8, 4, 4]
        columns.clear()
        config = DecodeConfig(max_new_tokens=9, tokens_per_step=2)
        decode(base, [[BOS, 5, 6, 7, 8, 9]], config, decoder="adjust", sampler=g)
        assert columns == [8, 8, 4, 8, 4]
        assert steps == [8, 8, 4, 7]  # the canvas ends at 15, and the round of its last token needs no step


def test_finished_rows_compute_nothing_and_final_keys_are_written_once() -> None:
    base = tiny_base("dream", block=4, end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=8, seed=1)
    canvas = Canvas(base, [[BOS, 5], [BOS, 5, 6, 7, 8]], config, new=[10, 3])
    cached, final = with_cache(base, config), list[Tensor]()
    again = base.hidden_again

    def spy(state: State, memory: Any, column_BN: Tensor, valid_BN: Tensor) -> Tensor:
        kept = [part[:, :4].clone() for part in memory.kept]  # the long row's first block
        done = int(memory.counts_B3[0, 0])
        assert not valid_BN[~canvas.open_B].any()
        out = again(state, memory, column_BN, valid_BN)
        if kept and final:
            assert all(torch.equal(old[0], part[0, :4]) for old, part in zip(kept, memory.kept, strict=True))
        if done >= 4:
            final.append(out)
        return out

    base.hidden_again = spy  # type: ignore[method-assign]
    cached = with_cache(base, config)
    while canvas.open:
        h_BLD = cached.hidden(canvas)
        canvas.start_round()
        from adjust_dlm.decoders.machinery.pick import pick

        canvas.commit(pick(base, h_BLD, canvas))
    assert len(final) > 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoder", ["joint", "parallel", "adjust", "verified", "verified:match=law"])
def test_rows_join_and_leave_between_rounds(family: str, decoder: str) -> None:
    """Each row as alone, whoever sits beside it and whenever it came."""
    base = tiny_base(family, block=4, end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=11, tokens_per_step=2, seed=3, order="entropy")
    decoder, _, options = read_variant(decoder)
    g = tiny_sampler(base) if DECODERS[decoder].needs_sampler else None
    texts, counts = prompts(4), ("base_calls_B", "sampler_calls_B", "rounds_B")
    alone = decode(base, texts, config, decoder=decoder, sampler=g, rows=list(range(len(texts))), **options)
    plan = make_plan(base, config, decoder=decoder, sampler=g, **options)
    waiting, running, done = list(enumerate(texts)), None, dict[int, tuple[list[int], ...]]()
    while waiting or running is not None:
        fresh = [waiting.pop(0) for _ in range(min(2, len(waiting)))]
        parts = [running] if running is not None else []
        if fresh:
            parts.append(RoundCanvas(base, [t for _, t in fresh], config, rows=[n for n, _ in fresh]))
        running = join(parts)
        running.play(plan.run)
        open_ = running.open_B.tolist()
        for b, row in enumerate(running.rows_B.tolist()):
            if not open_[b]:
                real = running.real_BL[b]
                calls = [int(getattr(running, name)[b]) for name in counts]
                done[row] = (running.tokens_BL[b][real].tolist(), running.order_BL[b][real].tolist(), calls)
        still = [b for b, is_open in enumerate(open_) if is_open]
        running = take(running, still) if still else None
    for n in range(len(texts)):
        real = alone.real_BL[n]
        calls = [int(getattr(alone, name)[n]) for name in counts]
        assert done[n] == (alone.tokens_BL[n][real].tolist(), alone.order_BL[n][real].tolist(), calls)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("config", [SamplerConfig(), SamplerConfig(layers=2, mlp=0.5, features=(1,))])
@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_a_step_of_g_is_the_one_over_the_whole_canvas(family: str, sparse: bool, config: SamplerConfig) -> None:
    base = tiny_base(family, block=4, end_ids=NO_END)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        g = Sampler(base, config).eval()
    for weight in g.norm_out.parameters():
        torch.nn.init.constant_(weight, 0.5)
    settings = DecodeConfig(max_new_tokens=11, tokens_per_step=3, seed=6)
    made = []
    for cached in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not cached:
                patch.setattr("adjust_dlm.decoders.with_cache", lambda base, config: base)
                patch.setattr("adjust_dlm.decoders.with_sampler_cache", lambda sampler: sampler)
            made.append(decode(base, prompts(4), settings, decoder="adjust", sampler=g, sparse=sparse))
    assert torch.equal(made[0].tokens_BL, made[1].tokens_BL)
    assert torch.equal(made[0].order_BL, made[1].order_BL)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [4, 8])
def test_sparse_steps_are_exact_once_the_candidates_are_the_block(family: str, size: int) -> None:
    base = tiny_base(family, block=size, end_ids=NO_END)
    g = tiny_sampler(base, layers=2, mlp=0.5)
    config = DecodeConfig(max_new_tokens=2 * size + 3, tokens_per_step=3, seed=6, candidates=100)
    dense, sparse = (
        decode(base, prompts(size), config, decoder="adjust", sampler=g, sparse=sparse) for sparse in (False, True)
    )
    assert torch.equal(dense.tokens_BL, sparse.tokens_BL)
    assert torch.equal(dense.order_BL, sparse.order_BL)


def test_a_sparse_step_renews_the_states_that_candidates_are_scored_by() -> None:
    """Blocks of 8, two candidates a round: in a shifted family the columns before them, too."""
    base = tiny_base("dream", block=8, end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=14, tokens_per_step=3, seed=6)
    stale = list[bool]()
    step = adjust_module.sparse_step

    def spy(g: Sampler, h_BLD: Tensor, canvas: Canvas, keys: Any, k: int) -> Tensor:
        out = step(g, h_BLD, canvas, keys, k)
        row_R, position_R = (canvas.open_BL & canvas.busy_B[:, None]).nonzero(as_tuple=True)
        changed_R = (base.at(out, canvas, row_R, position_R) != base.at(h_BLD, canvas, row_R, position_R)).any(-1)
        first_R = canvas.positions_BL[row_R, position_R] % 8 == 0
        stale.extend((~changed_R & ~first_R).tolist())
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adjust_module, "sparse_step", spy)
        decode(base, prompts(8), config, decoder="adjust", sampler=tiny_sampler(base), sparse=True)
    assert len(stale) > 20 and not any(stale)


def test_g_changes_the_open_block_alone() -> None:
    base = tiny_base("dream", block=4)
    state = left_pad([[BOS, 5, 6, 7, 8, MASK, 9, MASK, MASK, MASK], [BOS, 5, 6]])
    state.masked_BL[:] = state.tokens_BL == MASK
    h_BLD = base.hidden(state)
    changed_BL = (tiny_sampler(base)(h_BLD, state) != h_BLD).any(-1)
    assert changed_BL[0].nonzero().flatten().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "depth"), [(4, 1), (4, 3), (8, 6)])
def test_verified_is_joint_decoding_and_computes_the_open_block_once_a_draft(
    family: str, size: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base(family, block=size, end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=2 * size + 3, seed=5)
    joint = decode(base, prompts(size), config, decoder="joint")
    columns, real = list[tuple[int, int]](), TransformerBase.hidden_drafts

    def spy(
        base: Any, state: State, memory: Any, column_BN: Tensor, valid_BN: Tensor, token_BJS: Tensor, at: Tensor
    ) -> Any:
        columns.append((int(valid_BN.sum(-1).max()), token_BJS.shape[1] * token_BJS.shape[2]))
        return real(base, state, memory, column_BN, valid_BN, token_BJS, at)

    monkeypatch.setattr(TransformerBase, "hidden_drafts", spy)
    checked = decode(base, prompts(size), config, decoder="verified", sampler=tiny_sampler(base), depth=depth)
    assert torch.equal(joint.tokens_BL, checked.tokens_BL)
    assert torch.equal(joint.order_BL, checked.order_BL)
    assert all(own <= 2 * size and drafts <= (depth - 1) * size for own, drafts in columns)
    assert bool(columns) == (depth > 1)


def test_verified_books_what_a_row_would_cost_alone_and_leaves_the_keys_that_adjust_leaves() -> None:
    base = tiny_base("dream", block=2, end_ids=NO_END)
    g, config = tiny_sampler(base), DecodeConfig(max_new_tokens=9, seed=3)
    texts = [[BOS, 5], [BOS, 6, 7, 8], [BOS]]
    how: dict[str, Any] = {"decoder": "verified", "sampler": g, "depth": 4}
    together = decode(base, texts, config, **how)
    alone = [decode(base, [text], config, rows=[n], **how) for n, text in enumerate(texts)]
    assert together.base_calls_B.tolist() == [int(one.base_calls_B[0]) for one in alone]
    base = tiny_base("llada", block=4, end_ids=NO_END)
    g, plan = tiny_sampler(base), None
    plan = make_plan(base, config, decoder="verified", sampler=g, depth=3)
    canvas = Canvas(base, [[BOS, 5, 6]], config)
    plan.run(canvas)
    final = int(canvas.sampler_memory.counts_B3[0, 0])
    assert final >= 4
    right = g.keys(base.hidden(canvas), canvas).kept
    for kept, whole in zip(canvas.sampler_memory.kept, right, strict=True):
        torch.testing.assert_close(kept[:, :final], whole[:, :final], rtol=0, atol=2e-5)


@pytest.mark.parametrize("decoder", ["joint", "verified"])
def test_a_row_that_begins_anew_has_nothing_of_the_old_one(decoder: str) -> None:
    base = tiny_base("dream", block=4, end_ids=NO_END)  # the old row ends in the block in which the new one begins
    config, g = DecodeConfig(max_new_tokens=3, seed=2), tiny_sampler(base) if decoder == "verified" else None
    plan = make_plan(base, config, decoder=decoder, sampler=g)
    canvas = Canvas(base, [[BOS, 5, 6, 7, 8]], config, rows=[0])
    plan.run(canvas)
    before = canvas.base_calls_B + canvas.sampler_calls_B
    canvas.restart(0, [BOS, 9, 9, 9], 7)
    plan.run(canvas)
    fresh = decode(base, [[BOS, 9, 9, 9]], config, decoder=decoder, sampler=g, rows=[7])
    assert canvas.tokens_BL[0, 1:].tolist() == fresh.tokens_BL[0].tolist()
    calls = canvas.base_calls_B + canvas.sampler_calls_B - before
    assert calls.tolist() == (fresh.base_calls_B + fresh.sampler_calls_B).tolist()
    with pytest.raises(InputError, match="in a later block"):
        canvas.restart(0, [BOS, MASK, 5, 6, 7], 8)


@pytest.mark.parametrize("rule", ["best", "resample"])
def test_energies_of_completions_know_nothing_of_later_blocks(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same completions of the open block, with one block behind it or three."""
    base = tiny_base("llada", block=4)
    partner, seen = tiny_partner(base), list[Tensor]()
    options: dict[str, Any] = {"rule": rule, **({"window_end": 0.0} if rule == "resample" else {})}
    real = edlm_module._choose

    def spy(canvas: Canvas, energy_CR: Tensor, *rest: Any) -> Tensor:
        seen.append(energy_CR)
        return real(canvas, energy_CR, *rest)

    monkeypatch.setattr(edlm_module, "_choose", spy)
    starts = list[int]()
    for new in (7, 15):
        starts.append(len(seen))
        config = DecodeConfig(max_new_tokens=new, tokens_per_step=4, seed=5)
        decode(base, [[BOS]] * 6, config, decoder="edlm", partner=partner, completions=4, **options)
    short, long = (seen[at] for at in starts)
    torch.testing.assert_close(short, long, rtol=1e-4, atol=1e-4)
    assert float(short.abs().max()) < 1e3


@pytest.mark.parametrize("size", [2, 4])
def test_what_stands_left_alone_is_scored_alike_in_both_frames(size: int) -> None:
    state = State(torch.tensor([[1, 3, 0, 3]]), torch.ones(1, 4, dtype=torch.bool), torch.tensor([[False, True] * 2]))
    shifted, plain = (ExactBase(table(), block=size, shifted=shifted) for shifted in (True, False))
    left_BLD = shifted.by_position(shifted.hidden_causal(state), state)
    assert torch.equal(left_BLD[:, 1:], plain.hidden_causal(state)[:, 1:])


def test_a_base_with_blocks_passes_its_check() -> None:
    rows = [[BOS, 5, MASK, 7], [BOS, 6, MASK, 8, 9, MASK, 3]]
    for family in FAMILIES:
        check_base(tiny_base(family, block=4), rows)
        check_base(tiny_base(family, block=4, causal=True), rows)
    with pytest.raises(InputError, match="behind it in the same block of 2"):
        check_base(tiny_base("llada", block=2), [[BOS, MASK, 5, 6], [BOS, MASK, 5, 6, 7]])


def test_a_copy_for_a_retry_shares_the_finished_blocks() -> None:
    base = tiny_base("dream", block=4, end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=9, seed=2)
    plan = make_plan(base, config, decoder="joint")
    canvas = RoundCanvas(base, prompts(4), config)
    for _ in range(5):
        canvas.play(plan.run)
    kept = before(canvas)
    assert kept.memory.kept[0].data_ptr() == canvas.memory.kept[0].data_ptr()
    for one in (canvas, kept):  # the second as if the first had failed half-way
        while bool(one.open_B.any()):
            one.play(plan.run)
    assert torch.equal(canvas.tokens_BL, kept.tokens_BL) and torch.equal(canvas.order_BL, kept.order_BL)


def test_a_g_that_is_right_makes_verified_fast() -> None:
    """The base itself drafts: every draft stands, up to a block's end."""
    base = tiny_base("llada", block=4, end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=12, seed=5)
    checked = decode(base, [[BOS, 5, 6, 7]], config, decoder="verified", sampler=oracle(base), depth=4)
    assert torch.equal(checked.tokens_BL, decode(base, [[BOS, 5, 6, 7]], config, decoder="joint").tokens_BL)
    assert int(checked.rounds_B[0]) == 6  # a block's first pass drafts nothing: 1 and 3 of every 4 tokens


# What is refused -----------------------------------------------------------------------------------------------


def test_the_edge_of_the_last_block() -> None:
    state = to_edge(left_pad([[BOS, 5, 6, 7, 8], [BOS, 5, 6]]), 4, MASK)
    assert state.tokens_BL[:, 5:].tolist() == [[MASK] * 3, [MASK] * 3]
    assert state.real_BL[:, 5:].tolist() == [[True] * 3, [True, False, False]]
    assert to_edge(left_pad([[BOS, 5, 6, 7]]), 4, MASK).tokens_BL.shape == (1, 4)


@pytest.mark.parametrize(
    ("prompt", "settings", "said"),
    [
        ([BOS], {"block_length": 3}, "block_length is 3; base 'dream' has blocks of 4, which it must divide"),
        ([BOS], {"schedule": "reference"}, "schedule is 'reference'"),
        ([BOS], {"cache_period": 4}, "exact cache, always on"),
        ([BOS] * 50, {"max_new_tokens": 15}, "make 65; base 'dream' takes at most 64"),  # of 66, in whole blocks
        ([BOS, MASK, 5, 6, 7], {}, "prompt 0 has a mask at 1 and a token at 4, in a later block of 4"),
    ],
)
def test_bad_input_is_one_line(prompt: list[int], settings: dict[str, Any], said: str) -> None:
    base = tiny_base("dream", block=4, max_position_embeddings=66)
    with pytest.raises(InputError, match=said):
        decode(base, [prompt], DecodeConfig(**{"max_new_tokens": 7, **settings}), decoder="parallel")


def test_gaps_inside_the_open_block_are_fine() -> None:
    base = tiny_base("dream", block=4)
    out = decode(base, [[BOS, MASK, 5]], DecodeConfig(max_new_tokens=3), decoder="joint")
    assert out.tokens_BL[0, 2] == 5 and MASK not in out.tokens_BL[0]


def test_forms_and_samplers_that_do_not_fit() -> None:
    config = DecodeConfig(max_new_tokens=7)
    base = tiny_base("dream", block=4)
    with pytest.raises(InputError, match="origin commits at random over the whole canvas"):
        decode(base, [[BOS]], config, decoder="origin")
    with pytest.raises(InputError, match="pairing is 'token'"):
        Sampler(base, SamplerConfig.released())
    other = tiny_base("dream", block=8)
    assert len({base.fingerprint, other.fingerprint, tiny_base("dream").fingerprint}) == 3
    with pytest.raises(InputError, match="belongs to a base with fingerprint"):
        decode(base, [[BOS]], config, decoder="adjust", sampler=tiny_sampler(other))


# Speed, export, server -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["eager", "fast"])
def test_the_bench_times_a_block_base(form: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "base": "tiny-shape", "block": 8, "tokens_per_step": (2,), "batch_sizes": (2,), "new_tokens": (24,), "runs": 1,
        "prompt_tokens": 30, "device": "cpu", "cell_seconds": 0.2, "output": str(tmp_path),
    }  # fmt: skip
    made = make_runtime(RuntimeConfig(forms=(form,), decoders=("parallel", "adjust", "components"), **settings))
    assert not made["left_out"]
    parts = {(row["decoder"], row["part"]) for row in made["rows"]}
    assert {("components", "base pass"), ("components", "g step"), ("components", "round")} <= parts
    with pytest.raises(InputError, match="a base with blocks has eager and fast alone"):
        make_runtime(RuntimeConfig(forms=("compiled",), **settings))
    with pytest.raises(InputError, match="block can be set for"):
        RuntimeConfig(**{**settings, "base": "smol"})


def test_a_component_pass_computes_one_block_behind_any_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is S columns, in the middle of the text."""
    base = random_base("tiny-shape", device=torch.device("cpu"), dtype=torch.float32, block=8)
    clock = Bench(base, {"sampler": random_sampler(base)}, DecodeConfig(), [5] * 30, 1, 0.1, Ceilings(1.0, 1.0, None))
    canvas = half_filled(clock, Cell("eager", "components", 2, 2, 24))
    assert canvas.order_BL[0].tolist() == [*[-1] * 40, *[-2, -1] * 4, *[-2] * 6]
    parts = eager_parts(clock, canvas)
    columns, again = list[int](), TransformerBase.hidden_again

    def spy(*given: Any) -> Tensor:
        columns.append(given[3].shape[1])
        return again(*given)

    monkeypatch.setattr(TransformerBase, "hidden_again", spy)
    parts["base pass"][0]()
    parts["round"][0]()
    assert columns == [8, 8]


@pytest.mark.parametrize(("family", "kind"), [("dream", Qwen2ForCausalLM), ("sdar", Qwen3ForCausalLM)])
def test_an_exported_sampler_decodes_in_blocks_from_transformers(tmp_path: Path, family: str, kind: Any) -> None:
    base = tiny_base(family, block=4)
    model: Any = kind(tiny_config(family)).eval()
    model.model.load_state_dict(base.model.state_dict())
    model.lm_head.weight.data.copy_(base.head_matrix)
    folder = export(tiny_sampler(base), base, tmp_path / "g")
    settings: dict[str, Any] = {"tokens_per_step": 3, "max_new_tokens": 9, "seed": 5}
    ids = torch.tensor([[BOS, 5, 6]])
    out = generate_with(folder, model, {"inputs": ids, **settings})
    g = load_sampler(folder, base)  # weights are stored as bf16
    ours = decode(base, ids.tolist(), DecodeConfig(**settings), decoder="adjust", sampler=g)
    assert torch.equal(out, ours.tokens_BL)
    facts = json.loads((folder / "base_facts.json").read_text())
    assert (facts["spec"]["block"], facts["shape"]["block"]) == (4, 4)
    facts["spec"]["block"] = 8
    (folder / "base_facts.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match="block is 8, wanted 4"):
        generate_with(folder, model, {"inputs": ids, **settings})


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("decoder", ["joint", "adjust", "threshold", "edlm"])
def test_a_server_answers_as_decode_and_text_comes_block_by_block(decoder: str, *, eager: bool) -> None:
    base = chat_base(context=128, block=4)
    helpers: dict[str, Any] = {"sampler": tiny_sampler(base), "partner": tiny_partner(base)}
    engine = Engine(base, **helpers, limits=Limits(rows=3), eager=eager)
    asked = []
    for n in range(6):
        ids = [AR_BOS, *range(10, 11 + n)]
        work = work_of(ids, new=3 + 2 * n, seed=n, decoder=decoder, tokens_per_step=3)
        asked.append((ids, work, submit(engine, work)[1]))
        play(engine, 2)
    play(engine)
    for ids, work, log in asked:
        spec = work.rows[0]
        config = work.config.but(seed=spec.seed, max_new_tokens=spec.new)
        alone = decode(base, [ids], config, decoder=decoder, rows=[spec.row], **helpers)
        assert log.finished[0].ids == alone.tokens_BL[0].tolist()
        commits = [c.position for e in log.events if isinstance(e, Progress) for c in e.commits]
        assert [place // 4 for place in commits] == sorted(place // 4 for place in commits)
