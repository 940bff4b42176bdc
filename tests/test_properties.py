"""Whatever the prompts, K, canvas, settings and batch: the result is whole, orderly and each row's own."""

import itertools

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adjust_dlm.decoders import decode
from adjust_dlm.sampling import _nucleus, draw, process
from adjust_dlm.types import GIVEN, MASKED, DecodeConfig, DecodeResult
from helpers import BOS, CORE, MASK, RULES, TableBase, exact_base, oracle, row_of, tiny_base, tiny_sampler

WORDS, CONTEXT = 6, 14
ENDS = (4, 5)

configs = st.builds(
    DecodeConfig,
    tokens_per_step=st.integers(1, 9),
    max_new_tokens=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3]),
    order=st.sampled_from([None, *RULES]),
    order_on=st.sampled_from([None, "raw", "processed"]),
    schedule=st.sampled_from(["exact", "reference"]),
    suppress_eos=st.booleans(),
    block_length=st.sampled_from([None, 1, 3, 5]),
    candidates=st.sampled_from([None, 0, 1, 3]),
    seed=st.integers(0, 2**63 - 1),
)


def prompts(mask: int, words: int, first: list[int]) -> st.SearchStrategy[list[list[int]]]:
    """One to five prompts of 0..6 ids, masks among them."""
    token = st.one_of(st.integers(0, words - 1), st.just(mask))
    return st.lists(st.lists(token, max_size=6).map(lambda ids: [*first, *ids]), min_size=1, max_size=5)


def check(result: DecodeResult, given_: list[list[int]], mask: int, ends: tuple[int, ...]) -> None:
    """Everything that holds for every decode, row by row."""
    config, new = result.config, result.config.max_new_tokens
    for b, prompt in enumerate(given_):
        tokens, order, base_calls, sampler_calls = row_of(result, b)
        canvas = [*prompt, *[mask] * new]
        masked = [i for i, token in enumerate(canvas) if token == mask]
        assert len(tokens) == len(canvas)
        assert mask not in tokens
        for i, token in enumerate(canvas):
            if token != mask:
                assert (tokens[i], order[i]) == (token, GIVEN)
        committed = [i for i in masked if order[i] != MASKED]
        assert sorted(order[i] for i in committed) == list(range(len(committed)))
        ended = [i for i in committed if tokens[i] in ends]
        if config.suppress_eos:
            assert not ended
        for i in masked:
            if order[i] == MASKED:  # left open only behind an end with nothing open before it
                assert ended
                assert i > ended[0]
                assert tokens[i] == ends[0]
        if result.decoder != "adjust":
            assert sampler_calls == 0
        elif config.schedule == "exact":
            assert base_calls + sampler_calls == len(committed)  # a pass of f or of g before each commit
        else:
            assert base_calls + sampler_calls >= len(committed)  # published rounds may commit nothing
        if config.schedule == "exact" and config.block_length is None and not config.candidates:
            rounds = -(-len(masked) // config.tokens_per_step)
            assert base_calls == rounds if len(committed) == len(masked) else base_calls <= rounds


def split(rows: list[list[int]], cuts: list[int]) -> list[list[int]]:
    """Row numbers in consecutive batches."""
    edges = sorted({0, len(rows), *(c % len(rows) for c in cuts)})
    return [list(range(a, b)) for a, b in itertools.pairwise(edges)]


def heeded(config: DecodeConfig, decoder: str) -> DecodeConfig:
    """Without candidates where the decoder refuses them."""
    return config.but(candidates=None) if decoder == "parallel" else config


def check_company(base, given_, config, decoder, sampler, cuts) -> DecodeResult:
    """The whole batch at once equals the same rows in any other batches."""
    config = heeded(config, decoder)
    whole = decode(base, given_, config, decoder=decoder, sampler=sampler)
    for rows in split(given_, cuts):
        part = decode(base, [given_[r] for r in rows], config, decoder=decoder, sampler=sampler, rows=rows)
        for b, r in enumerate(rows):
            assert row_of(part, b) == row_of(whole, r)
    return whole


@settings(max_examples=100)
@given(
    given_=prompts(WORDS, WORDS, []), config=configs, decoder=st.sampled_from(CORE),
    cuts=st.lists(st.integers(0, 5), max_size=3), table=st.integers(0, 5),
)  # fmt: skip
@example(given_=[[]], config=DecodeConfig(max_new_tokens=1), decoder="adjust", cuts=[], table=0)
@example(
    given_=[[6] * 6, []], config=DecodeConfig(tokens_per_step=9, max_new_tokens=8, temperature=0),
    decoder="parallel", cuts=[1], table=1,
)  # fmt: skip
def test_any_decode_of_fixed_tables(given_, config, decoder, cuts, table) -> None:
    generator = torch.Generator().manual_seed(table)
    base = TableBase(3 * torch.randn(CONTEXT, WORDS, generator=generator), end_ids=ENDS, mask_logit=9.0)
    shift_LD = torch.randn(CONTEXT, WORDS + 1, generator=generator)

    def g(h_BLD, state):
        return h_BLD + shift_LD[state.positions_BL] * state.masked_BL.sum(-1)[:, None, None]

    check(check_company(base, given_, config, decoder, g, cuts), given_, WORDS, ENDS)


TINY = {family: tiny_base(family, end_ids=(1, 3), num_hidden_layers=1) for family in ("dream", "llada")}
SAMPLERS = {family: tiny_sampler(base) for family, base in TINY.items()}


@settings(max_examples=25)
@given(
    family=st.sampled_from(sorted(TINY)), given_=prompts(MASK, MASK, [BOS]), config=configs,
    decoder=st.sampled_from(CORE), cuts=st.lists(st.integers(0, 5), max_size=2),
    period=st.sampled_from([None, 1, 2, 9]),
)  # fmt: skip
def test_any_decode_of_a_transformer(family, given_, config, decoder, cuts, period) -> None:
    config = config.but(cache_period=period)
    result = check_company(TINY[family], given_, config, decoder, SAMPLERS[family], cuts)
    check(result, given_, MASK, (1, 3))
    assert int(result.tokens_BL.max()) < 22


@settings(max_examples=30)
@given(
    tokens_per_step=st.integers(1, 6), rule=st.sampled_from(RULES), seed=st.integers(0, 2**63 - 1),
    prompt=st.lists(st.integers(0, 3), max_size=3), temperature=st.sampled_from([0.0, 0.6, 1.0]),
)  # fmt: skip
def test_an_oracle_makes_adjust_equal_to_joint(tokens_per_step, rule, seed, prompt, temperature) -> None:
    """Prompts of words and masks (id 3) on the enumerable base."""
    base = exact_base(3, 5, end_ids=(2,))
    config = DecodeConfig(
        tokens_per_step=tokens_per_step, max_new_tokens=5 - len(prompt), order=rule, seed=seed, temperature=temperature
    )
    joint = decode(base, [prompt] * 8, config, decoder="joint")
    adjust = decode(base, [prompt] * 8, config.but(candidates=0), decoder="adjust", sampler=oracle(base))
    assert torch.equal(joint.tokens_BL, adjust.tokens_BL)
    assert torch.equal(joint.order_BL, adjust.order_BL)


@settings(max_examples=30)
@given(config=configs, decoder=st.sampled_from(CORE))
def test_a_trajectory_replays_its_decode(config, decoder) -> None:
    """The states of a trajectory are the canvases that the decode went through, commit by commit."""
    base = TableBase(torch.randn(CONTEXT, WORDS, generator=torch.Generator().manual_seed(6)), end_ids=ENDS)
    seen = []
    config = heeded(config, decoder).but(tokens_per_step=1, schedule="exact")
    result = decode(
        base, [[0, WORDS, 2]], config, decoder=decoder, sampler=lambda h, s: h,
        watch=lambda canvas: seen.append(torch.where(canvas.order_BL[0] == MASKED, WORDS, canvas.tokens_BL[0])),
    )  # fmt: skip
    trajectory = result.trajectory(0)
    assert trajectory.commits == len(seen)
    for t, tokens_L in enumerate(seen, start=1):
        assert torch.equal(trajectory.state(t, WORDS)[0], tokens_L)


logits_rows = st.lists(
    st.one_of(st.floats(-80, 80, width=32), st.integers(-3, 3).map(float), st.just(-float("inf"))),
    min_size=1, max_size=40,
).filter(lambda row: max(row) > -float("inf"))  # fmt: skip


@settings(max_examples=300)
@given(row=logits_rows, config=configs, numerator=st.integers(0, 2**32 - 1))
@example(row=[0.0, -float("inf")], config=DecodeConfig(top_p=0.5), numerator=2**32 - 1)
def test_any_draw_is_a_token_that_was_allowed(row, config, numerator) -> None:
    logits_RV = torch.tensor([row])
    processed_RV = process(logits_RV, config)
    kept_V = processed_RV[0] > -torch.inf
    assert bool(kept_V.any())
    assert not bool((kept_V & (logits_RV[0] == -torch.inf)).any())
    if config.top_k:
        assert int(kept_V.sum()) <= config.top_k
    token = int(draw(processed_RV, torch.tensor([numerator / 2**32], dtype=torch.float64), config.temperature))
    assert bool(kept_V[token])
    assert float(processed_RV[0].softmax(-1)[token]) > 0
    best = max(range(len(row)), key=lambda i: (row[i], -i))
    assert bool(kept_V[best])  # the likeliest token, lowest id among equals, survives every filter


@settings(max_examples=300)
@given(
    parts=st.lists(st.integers(0, 50), min_size=1, max_size=60).filter(any),
    share=st.floats(0.001, 0.999),
)
def test_any_nucleus_is_the_smallest_set_of_enough_mass(parts, share) -> None:
    p_V = torch.tensor(parts, dtype=torch.float64) / sum(parts)
    kept_V = _nucleus(p_V[None].float(), share)[0]
    inside, slack = p_V[kept_V], 1e-5
    assert float(inside.sum()) >= share - slack
    assert float(inside.sum() - inside.min()) < share + slack
    if not bool(kept_V.all()):
        assert float(inside.min()) >= float(p_V[~kept_V].max())
    for value in set(p_V[kept_V].tolist()):  # of equals the lowest ids are kept
        equals = kept_V[p_V == value].tolist()
        assert equals == sorted(equals, reverse=True)
