"""What only a card can show: the same tokens as the CPU, eager and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adjust_dlm.bases import attention, layers, load_base
from adjust_dlm.bases.layers import join_projections
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.bench.shapes import random_base
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.decoders import DECODERS, decode, decode_many
from adjust_dlm.decoders.fast.engine import captures
from adjust_dlm.losses import kl_and_delta, pick_delta
from adjust_dlm.sampler import Sampler, SamplerConfig, load_sampler
from adjust_dlm.sampling import uniform
from adjust_dlm.train.blocks import pack_blocks
from adjust_dlm.train.one_pass import Pool, PoolConfig
from adjust_dlm.train.trainer import TrainConfig, train
from adjust_dlm.train.unroll import unroll, unrolled_kl
from adjust_dlm.types import DecodeConfig, State
from helpers import build, left_pad, tiny_base, tiny_sampler, wide
from serving import mixed, told
from test_block_bases import NO_END, cached_and_whole, played, prompts
from test_block_training import SIZE, texts
from test_checkpoint import write
from tiny_ar import tiny_partner

pytestmark = pytest.mark.gpu
PROMPTS = [[47, 1, 2], [47, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("decoder", ["joint", "parallel", "adjust"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_card_and_cpu_write_the_same_tokens(decoder: str, temperature: float) -> None:
    config = DecodeConfig(tokens_per_step=4, max_new_tokens=12, temperature=temperature)
    (base, g), (card, card_g) = build("cpu"), build("cuda")
    here = decode(base, PROMPTS, config, decoder=decoder, sampler=g)
    there = decode(card, PROMPTS, config, decoder=decoder, sampler=card_g)
    assert torch.equal(here.tokens_BL, there.tokens_BL.cpu())
    assert torch.equal(here.order_BL, there.order_BL.cpu())


def test_compiled_base_writes_the_same_tokens() -> None:
    config = DecodeConfig(tokens_per_step=4, max_new_tokens=12, temperature=0.0)
    base, g = build("cuda")
    eager = decode(base, [[47, 1]] * 8, config, decoder="adjust", sampler=g)
    base.compile()
    assert torch.equal(eager.tokens_BL, decode(base, [[47, 1]] * 8, config, decoder="adjust", sampler=g).tokens_BL)


def test_uniforms_do_not_depend_on_the_device() -> None:
    rows = torch.arange(2**32 - 500, 2**32 + 500)
    here = uniform(7, rows, rows % 13, rows % 17)
    assert torch.equal(here, uniform(7, rows.cuda(), (rows % 13).cuda(), (rows % 17).cuda()).cpu())


def test_compiled_kl_equals_eager() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(64, 1000, generator=generator).cuda() for _ in "ab")
    weight = torch.rand(64, generator=generator).cuda()
    for a, b in zip(
        kl_and_delta(teacher, student, weight),
        torch.compile(kl_and_delta)(teacher, student, weight),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_fused_kl_equals_torch_at_full_vocabulary() -> None:
    """Dream's V, bf16 as the head gives it, rows of a chunk that others share."""
    from adjust_dlm.kernels import kl

    generator = torch.Generator("cuda").manual_seed(0)
    teacher, student = ((3 * torch.randn(96, 152064, device="cuda", generator=generator)).bfloat16() for _ in "ab")
    for logits in (teacher, student):
        logits[:, 151666] = logits[:, 151670:] = -torch.inf
    weight = torch.rand(64, device="cuda", generator=generator)
    wanted_kl, wanted = kl_and_delta(teacher[16:80], student[16:80], weight)
    got_kl, got = kl.kl_and_delta(teacher[16:80], student[16:80], weight)
    torch.testing.assert_close(got_kl, wanted_kl, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.float(), wanted, rtol=2**-7, atol=1e-10)
    assert got.data_ptr() == student[16:].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["dream", "llada", "sdar"])
def test_half_precision_kernels_give_the_states_of_the_plain_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype
) -> None:
    """Pads by runs of flash attention, too; joined projections; and g after it."""
    base = load_base(str(write(tmp_path, family)), device="cuda", dtype=dtype)
    assert isinstance(base, TransformerBase)
    g = Sampler(base).to("cuda", dtype).eval().requires_grad_(False)
    state = left_pad([[2, 5, 36, 36], [5, 36], [2, 5, 7, 3, 36, 36, 36]], mask_id=36, pad_id=34)
    state = State(state.tokens_BL.cuda(), state.real_BL.cuda(), state.masked_BL.cuda())
    h_BLD = base.hidden(state)
    with torch.no_grad():
        seen = {"g": g(h_BLD, state), "f": h_BLD}
        for part in (base.model, g):
            join_projections(part)
        seen |= {"g joined": g(h_BLD, state), "f joined": base.hidden(state)}
        for module in (attention, layers):
            monkeypatch.setattr(module, "fuses", lambda h: False)
        wanted = {"g": g(h_BLD, state), "f": base.hidden(state)}
    for name, got in seen.items():
        exact = wanted[name[0]][state.real_BL].float()
        assert (got[state.real_BL].float() - exact).norm() < 0.02 * exact.norm(), name


def test_one_pass_on_a_card_sees_what_the_cpu_sees() -> None:
    """The same rows, ranks and loss; on the card by the fused KL."""
    results = []
    for device in ("cpu", "cuda"):
        base, g = build(device)
        config = PoolConfig(rows=8, max_new_tokens=12)
        pool = Pool(base, config, PromptSource("two", PROMPTS), length=5, rollout=2, slices=4)
        delta = pick_delta("auto", torch.device(device))
        seen = []
        for _ in range(8):
            frames = pool.frames()
            loss = unrolled_kl(base, unroll(g, frames, rollout=2), (1, 2), delta=delta)
            grad = torch.autograd.grad(loss, g.mix.weight)[0]
            seen.append([t.cpu() for t in (frames.x.tokens_BL, frames.rank_BL, frames.text_SN, loss.detach(), grad)])
        results.append(seen)
    for here, there in zip(*results, strict=True):
        for a, b in zip(here[:3], there[:3], strict=True):
            assert torch.equal(a, b)
        for a, b in zip(here[3:], there[3:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("decoder", [name for name in DECODERS if name != "origin"])
@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_every_decoder_in_blocks_writes_what_the_cpu_writes(decoder: str, family: str) -> None:
    """With the cache and by passes over the whole canvas."""
    order = "confidence" if decoder == "guided" else None
    config, seen = DecodeConfig(max_new_tokens=11, tokens_per_step=3, seed=4, order=order), []
    for device, cached in (("cpu", True), ("cuda", True), ("cuda", False)):
        base = tiny_base(family, block=8, end_ids=NO_END, device=device)
        seen.append(played(base, config, decoder, prompts(8)[::3], cached=cached))
    for card in seen[1:]:
        assert torch.equal(seen[0].tokens_BL, card.tokens_BL.cpu())
        assert torch.equal(seen[0].order_BL, card.order_BL.cpu())


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("family", ["dream", "llada", "sdar"])
def test_cached_states_in_blocks_are_those_of_the_whole_canvas(family: str, dtype: torch.dtype, most: float) -> None:
    base = tiny_base(family, block=16, max_position_embeddings=256, end_ids=NO_END, device="cuda")
    base.model.to(dtype)
    base.head_matrix = base.head_matrix.to(dtype)
    for h_RD, whole_RD in cached_and_whole(base, 16):
        assert h_RD.dtype == dtype and (h_RD - whole_RD).float().norm() <= most * whole_RD.float().norm()


@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_training_in_blocks_on_a_card_sees_what_the_cpu_sees(family: str) -> None:
    """The loss, by the fused KL there, and every gradient."""
    data, results = texts(tiny_base(family, block=SIZE, end_ids=(23,))), []
    for device in ("cpu", "cuda"):
        base = tiny_base(family, block=SIZE, end_ids=(23,), device=device)
        g = tiny_sampler(base).requires_grad_(True)
        frames = pack_blocks(data, lambda n, commits: 0, SIZE + 2, base).to(base.device).frames(base)
        loss = unrolled_kl(base, unroll(g, frames, rollout=2), (1, 2), delta=pick_delta("auto", base.device))
        loss.backward()
        results.append([loss.detach().cpu(), *(p.grad.cpu() for p in g.parameters() if p.grad is not None)])
    for here, there in zip(*results, strict=True):
        assert (here - there).norm() <= 1e-3 * here.norm()


def test_a_g_of_a_block_base_is_trained_in_half_precision_and_decodes(tmp_path: Path) -> None:
    base = random_base("tiny-shape", device=torch.device("cuda"), dtype=torch.bfloat16, block=8)
    text = str(tmp_path / "text")
    make_trajectories(TrajectoriesConfig(output=text, num=16, max_new_tokens=31, batch_size=16, shard_rows=16), base)
    config = TrainConfig(
        trajectories=(text,), output=str(tmp_path / "g"), steps=3, slices=4, heldout=4, heldout_texts=4, warmup=1
    )
    result = train(config, base)
    assert result["finished"] and result["divergence"]["adjust"]["kl_qp"] > 0
    g = load_sampler(result["sampler"], base)
    made = decode(base, PROMPTS, DecodeConfig(max_new_tokens=20, tokens_per_step=3), sampler=g)
    assert base.spec.mask_id not in made.tokens_BL


def test_layers_spread_over_cards_and_the_cpu_give_the_same_states(tmp_path: Path) -> None:
    folder = str(write(tmp_path, "llada"))
    plain = load_base(folder, device="cuda", dtype=torch.float32)
    last = torch.cuda.device_count() - 1
    places = {"embed_tokens": last, "layers.0": "cpu", "layers.1": 0, "norm": last}
    placed = load_base(folder, device="cuda", dtype=torch.float32, device_map=places)
    config = DecodeConfig(max_new_tokens=8, tokens_per_step=2, temperature=0.0)
    torch.manual_seed(0)
    g = Sampler(plain).eval().cuda()
    g.save(tmp_path / "g")
    results = [
        decode(base, [[2, 3], [4]], config, decoder="adjust", sampler=load_sampler(tmp_path / "g", base)).tokens_BL
        for base in (plain, placed, load_base(folder, dtype=torch.float32, device_map="auto"))
    ]
    assert all(torch.equal(results[0].cpu(), other.cpu()) for other in results[1:])


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.05), ("fp8", 0.1), ("fp8-dynamic", 0.15)])
def test_quantized_states_stay_near(tmp_path: Path, kind: str, most: float) -> None:
    pytest.importorskip("torchao")
    folder = str(write(tmp_path, "dream"))
    plain, small = (load_base(folder, device="cuda", quantize=q) for q in (None, kind))
    state = left_pad([[2, 5, 36, 36]], mask_id=36, pad_id=34)
    state = State(state.tokens_BL.cuda(), state.real_BL.cuda(), state.masked_BL.cuda())
    exact, got = (base.hidden(state).float() for base in (plain, small))
    assert (got - exact).norm() < most * exact.norm()


def test_a_compiled_base_is_compiled_once_for_one_shape(tmp_path: Path) -> None:
    base = load_base(str(write(tmp_path, "dream")), device="cuda")
    base.compile()
    counters = torch._dynamo.utils.counters["stats"]
    seen = []
    for seed in range(3):
        decode(base, [[2, 3]] * 4, DecodeConfig(max_new_tokens=8, seed=seed), decoder="joint")
        seen.append(counters["unique_graphs"])
    assert seen[0] == seen[2]  # all was compiled in the first decode


@pytest.mark.parametrize("decoder", ["joint", "adjust", "verified", "cascade", "klass", "edlm", "apd", "dcd"])
def test_card_and_cpu_agree_with_cache_blocks_and_partner(decoder: str) -> None:
    config = DecodeConfig(
        tokens_per_step=2, max_new_tokens=12, temperature=0.0, block_length=5, cache_period=3, cache_window=2
    )
    results = []
    for device in ("cpu", "cuda"):
        base, g = build(device)
        partner = tiny_partner(base)
        options = {"tau": 0.3} if decoder in ("cascade", "klass") else {}
        results.append(decode(base, PROMPTS, config, decoder=decoder, sampler=g, partner=partner, **options))
    here, there = results
    assert torch.equal(here.tokens_BL, there.tokens_BL.cpu())
    for name in ("base_calls_B", "sampler_calls_B", "partner_calls_B", "rounds_B"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu())


# The fast form: captured graphs and kernels --------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["joint", "parallel", "adjust"])
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "order_on": "raw", "suppress_eos": True},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.0, "order": "confidence"},
        {"temperature": 1.0, "order": "confidence"},
        {"temperature": 1.0, "order": "margin", "block_length": 5},
        {"temperature": 1.0, "order": "random", "schedule": "reference"},
        {"temperature": 1.0, "order": "left_to_right", "candidates": 3},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_captured_steps_write_the_same_tokens(decoder: str, changes: dict[str, object]) -> None:
    base, g = wide("cuda")
    if decoder == "parallel":
        changes = {**changes, "candidates": 0}
    own = [{"sparse": True}, {}] if decoder == "adjust" and changes.get("candidates") != 0 else [{}]
    for seed in (0, 1):  # the second decode replays what the first captured
        config = DecodeConfig(**{"tokens_per_step": 4, "max_new_tokens": 13, "seed": seed, **changes})
        for options in own:
            slow = decode(base, PROMPTS * 3, config, decoder=decoder, sampler=g, eager=True, **options)
            for slots in (None, 2):
                quick = decode(
                    base, PROMPTS * 3, config, decoder=decoder, sampler=g, eager=False, slots=slots, **options
                )
                for name in ("tokens_BL", "order_BL", "base_calls_B", "sampler_calls_B", "rounds_B"):
                    assert torch.equal(getattr(slow, name), getattr(quick, name)), (name, seed, slots)
    assert captures(base) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "form",
    [{"layers": 3}, {"features": (1,)}, {"layers": 2, "features": (1,)}],
    ids=str,
)
def test_every_form_of_g_is_captured(
    form: dict[str, object], temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    base, _ = wide("cuda")
    g = Sampler(base, SamplerConfig(**form)).eval().to("cuda")  # type: ignore[arg-type]
    seen = []
    config = DecodeConfig(tokens_per_step=4, max_new_tokens=13, temperature=temperature, candidates=4)
    for again in (False, True):
        for sparse in (False, True):
            slow, quick = (
                decode(base, PROMPTS * 3, config, sampler=g, eager=eager, sparse=sparse) for eager in (True, False)
            )
            for name in ("tokens_BL", "order_BL", "base_calls_B", "sampler_calls_B", "rounds_B"):
                assert torch.equal(getattr(slow, name), getattr(quick, name)), (name, again, sparse)
        seen.append(captures(base))
    assert seen[0] == seen[1] > 0
    assert not caplog.records


def test_captures_are_few_for_many_lengths_and_k(caplog: pytest.LogCaptureFixture) -> None:
    """H25: 20 prompts of 20 lengths, K = 1..8: three shapes; the same prompts again capture nothing."""
    base, g = wide("cuda")
    seen = []
    for _ in range(2):
        for length in range(1, 21):
            config = DecodeConfig(tokens_per_step=1 + length % 8, max_new_tokens=24, temperature=0.0)
            prompt = [[47, *range(1, length)]]
            slow, quick = (decode(base, prompt, config, sampler=g, eager=eager) for eager in (True, False))
            assert torch.equal(slow.tokens_BL, quick.tokens_BL)
        seen.append(captures(base))
    # Of two shapes: base pass, picks, whole step, last steps. The prompt that leaves no pad has K = 1: pass and picks.
    assert seen[0] == seen[1] <= 2 * (1 + 3 + 1 + 3) + (1 + 3)
    assert not caplog.records


def test_compiled_and_captured_together() -> None:
    base, g = wide("cuda")
    config = DecodeConfig(tokens_per_step=4, max_new_tokens=12, temperature=0.0)
    want = decode(base, PROMPTS * 2, config, sampler=g, eager=True).tokens_BL
    base.compile()
    for _ in range(2):
        assert torch.equal(decode(base, PROMPTS * 2, config, sampler=g).tokens_BL, want)


def test_many_prompts_on_a_card() -> None:
    base, g = wide("cuda")
    config = DecodeConfig(tokens_per_step=2, max_new_tokens=8)
    prompts = [[47, *range(1, 1 + n % 7)] for n in range(21)]
    for which, result in decode_many(base, prompts, config, batch_size=4, sampler=g):
        alone = decode(base, [prompts[n] for n in which], config, sampler=g, rows=which, eager=True)
        assert torch.equal(alone.tokens_BL, result.tokens_BL)


def test_what_cannot_be_captured_is_called_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A head that waits for the device: no graphs, the same tokens, one line in the log."""
    base, g = wide("cuda")
    config = DecodeConfig(tokens_per_step=2, max_new_tokens=6, temperature=0.0)
    want = decode(base, PROMPTS, config, sampler=g, eager=True).tokens_BL
    head = base.head
    base.head = lambda h_RD: head(h_RD) if bool(h_RD.isfinite().all()) else h_RD  # type: ignore[method-assign]
    assert torch.equal(decode(base, PROMPTS, config, sampler=g).tokens_BL, want)
    assert [record.getMessage()[:34] for record in caplog.records] == ["CUDA graphs are off for this base:"]


def test_nan_is_found_in_captured_steps() -> None:
    base, g = wide("cuda")
    base.head_matrix[7] = torch.nan
    with pytest.raises(FloatingPointError, match="gave NaN"):
        decode(base, PROMPTS, DecodeConfig(max_new_tokens=6), sampler=g)


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8-dynamic"])
def test_quantized_layers_in_the_fast_form(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchao")
    base = load_base(str(write(tmp_path, "dream")), device="cuda", quantize=kind)
    config = DecodeConfig(max_new_tokens=8, tokens_per_step=2, temperature=0.0)
    g = Sampler(base).to("cuda", torch.bfloat16).eval()
    result = decode(base, [[2, 5], [2, 5, 7]], config, sampler=g)
    assert not bool((result.tokens_BL == base.spec.mask_id).any())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_server_on_captured_rounds_answers_as_the_reference(
    temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A dozen requests that come and go, the same ones twice: the second time nothing is captured."""
    reference = told(*mixed("cuda", temperature=temperature, eager=True))
    engine, works = mixed("cuda", temperature=temperature, eager=False)
    assert told(engine, works) == reference
    held = engine.held
    assert held.captures > 0 and held.functions > 0 and held.buffer_bytes > 0
    assert told(engine, works) == reference
    assert engine.held == held
    assert {record.getMessage() for record in caplog.records} <= {
        "eager decoding: decoder threshold has no fast form; only passes are captured"
    }
