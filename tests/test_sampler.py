"""g: its formula by hand, what it pairs, what it owns, and files that are whole or refused by name."""

import errno
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from adjust_dlm.bases.memory import at_columns
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import decode
from adjust_dlm.sampler import CONFIG, WEIGHTS, Sampler, SamplerConfig, load_sampler
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import FAMILIES, MASK, exact_base, left_pad, tiny_base, tiny_config, tiny_sampler

ROWS = [[2, 5, MASK, 7, MASK, 9], [4, MASK, 6], [MASK]]
LAYERS = {"dream": (Qwen2DecoderLayer, Qwen2RotaryEmbedding), "llada": (LlamaDecoderLayer, LlamaRotaryEmbedding)}


def rms(x: Tensor) -> Tensor:
    return x.double().square().mean(-1).sqrt()


def by_hand(
    base: TransformerBase, family: str, sampler: Sampler, h_LD: Tensor, row: list[int], form: Any = None
) -> Tensor:
    """g on one unpadded row, from its tensors and a layer of the plain class under an all-visible mask."""
    weights, config = sampler.state_dict(), form or sampler.config
    e_LD = base.model.embed_tokens.weight[row]
    if family == "dream" and config.pairing == "state":
        e_LD = torch.cat([e_LD[:1], e_LD[:-1]])  # x_{i-1} beside the state that stands at i-1 and scores x_i

    def norm(x_LD: Tensor, name: str) -> Tensor:
        if not config.norms:
            return x_LD
        eps = base.layer_config.rms_norm_eps
        return x_LD / (x_LD.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    mixed_L2D = torch.cat([norm(e_LD, "norm_embed"), norm(h_LD, "norm_hidden")], -1)
    z_LD = mixed_L2D @ weights["mix.weight"].T + weights["mix.bias"]
    layer_class, rotary_class = LAYERS[family]
    plain_config = tiny_config(family)
    plain_config._attn_implementation = "eager"
    layer = layer_class(plain_config, layer_idx=0).eval()
    layer.load_state_dict({k.removeprefix("layer.layer."): v for k, v in weights.items() if k.startswith("layer.")})
    positions = torch.arange(len(row))[None]
    everything = torch.zeros(1, 1, len(row), len(row))
    turned = rotary_class(config=plain_config)(z_LD[None], positions)
    out = layer(z_LD[None], attention_mask=everything, position_ids=positions, position_embeddings=turned)
    z_LD = norm((out if isinstance(out, Tensor) else out[0])[0], "norm_out")
    return h_LD + z_LD if config.residual else z_LD


VARIANTS = {
    "default": SamplerConfig(),
    "token": SamplerConfig(pairing="token"),
    "printed": SamplerConfig.printed(),
    "released": SamplerConfig.released(),
    "no residual": SamplerConfig(residual=False),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_g_is_its_formula(family: str, variant: str) -> None:
    base = tiny_base(family)
    fields = vars(VARIANTS[variant])
    sampler = tiny_sampler(base, **fields)
    state = left_pad(ROWS)
    h_BLD = base.hidden(state)
    with torch.no_grad():
        got = sampler(sampler(h_BLD, state), state)  # two steps: h' is the next h
        for b, row in enumerate(ROWS):
            h_LD = h_BLD[b, -len(row) :]
            wanted = by_hand(base, family, sampler, by_hand(base, family, sampler, h_LD, row), row)
            torch.testing.assert_close(got[b, -len(row) :], wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_nothing(family: str) -> None:
    base = tiny_base(family)
    sampler, state = tiny_sampler(base), left_pad(ROWS)
    together = sampler(base.hidden(state), state)
    for b, row in enumerate(ROWS):
        alone = left_pad([row])
        torch.testing.assert_close(
            together[b, -len(row) :], sampler(base.hidden(alone), alone)[0], atol=1e-5, rtol=1e-5
        )


def test_pairing_matters_only_in_a_shifted_frame() -> None:
    for family, same in (("dream", False), ("llada", True)):
        base = tiny_base(family)
        state = left_pad(ROWS[:1])
        h_BLD = base.hidden(state)
        one, other = (tiny_sampler(base, pairing=p)(h_BLD, state) for p in ("state", "token"))
        assert torch.equal(one, other) is same


@pytest.mark.parametrize("init", [0.1, 1e-6])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_g_moves_every_state_by_its_output_norm(family: str, init: float) -> None:
    """RMSNorm gives unit rows, so a step has exactly the length of the norm's initial weight."""
    base = tiny_base(family)
    sampler, state = Sampler(base, SamplerConfig(output_norm_init=init)), left_pad(ROWS[:1])
    h_BLD = base.hidden(state).double()
    step = sampler.double()(h_BLD, state) - h_BLD
    assert rms(step).flatten().tolist() == pytest.approx([init] * 6, rel=0.01)
    assert SamplerConfig().output_norm_init == 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_g_with_a_tiny_output_norm_decodes_like_parallel(family: str) -> None:
    base = tiny_base(family)
    sampler = tiny_sampler(base, output_norm_init=1e-6)
    config = DecodeConfig(max_new_tokens=12, tokens_per_step=4, temperature=0)
    one = decode(base, [[2, 5], [2, 6, 7]], config, decoder="parallel")
    other = decode(base, [[2, 5], [2, 6, 7]], config, decoder="adjust", sampler=sampler)
    assert torch.equal(one.tokens_BL, other.tokens_BL)
    assert torch.equal(one.order_BL, other.order_BL)


def test_the_form_in_the_paper_has_no_norms_and_no_residual() -> None:
    base = tiny_base("dream")
    paper = Sampler(base, SamplerConfig.printed())
    assert {k.split(".")[0] for k in paper.state_dict()} == {"mix", "layer"}
    state = left_pad(ROWS[:1])
    h_BLD = base.hidden(state)
    with torch.no_grad():
        for weight in paper.layer.parameters():  # an empty layer passes its input on
            if weight.ndim > 1:
                weight.zero_()
        wanted = paper.mix(torch.cat([base.embed(state.tokens_BL), h_BLD], -1))
        assert torch.equal(paper(h_BLD, state), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_g_owns_neither_embedding_nor_head(family: str) -> None:
    base = tiny_base(family)
    sampler = Sampler(base)
    names = sorted(sampler.state_dict())
    assert names == sorted(k for k, _ in sampler.named_parameters())  # no buffers in the file
    assert sorted({k.split(".")[0] for k in names}) == ["layer", "mix", "norm_embed", "norm_hidden", "norm_out"]
    assert not any("embed_tokens" in k or "lm_head" in k for k in names)
    owned = {p.data_ptr() for p in sampler.parameters()}
    assert not owned & {p.data_ptr() for p in (*base.model.parameters(), base.head_matrix)}
    kv, biases = {"dream": (16, 32 + 2 * 16), "llada": (32, 0)}[family]
    layer = 2 * 32 * 32 + 2 * 32 * kv + biases + 3 * 32 * 64 + 2 * 32
    assert sum(p.numel() for p in sampler.parameters()) == layer + (64 * 32 + 32) + 3 * 32


# Columns -------------------------------------------------------------------------------------------------------

KNOBS = list(itertools.product((1, 2, 3), (1.0, 0.5), ((), (1,), (1, 2))))
LENGTHS = {"padded": [5, 3, 6], "equal": [6, 6, 6]}


def some_state(lengths: list[int]) -> State:
    rows = [[2, 5, MASK, 7, MASK, 9], [4, MASK, 6, 8, 3, MASK], [MASK] * 6]
    return left_pad([row[:n] for row, n in zip(rows, lengths, strict=True)])


def after(state: State, column_B: list[int]) -> State:
    """The canvas with one more token in each row."""
    tokens_BL = state.tokens_BL.clone()
    tokens_BL[torch.arange(len(column_B)), column_B] = 11
    return State(tokens_BL, state.real_BL, (tokens_BL == MASK) & state.real_BL, padded=state.padded)


@pytest.mark.parametrize(
    ("family", "pairing", "lengths"),
    [("dream", "state", "equal"), ("dream", "token", "padded"), ("llada", "state", "padded"),
     ("llada", "token", "equal")],
)  # fmt: skip
def test_a_step_at_some_columns_is_the_whole_step_there(family: str, pairing: Any, lengths: str) -> None:
    """For every form of g, from the base's states and its own; with keys of before, too, once all columns are new."""
    base, one = tiny_base(family, num_hidden_layers=3), some_state(LENGTHS[lengths])
    two = after(one, [4, 4, 5])
    column_BN = torch.tensor([[4, 1], [5, 3], [0, 2]])
    every_BN = torch.tensor([[5, 0, 4, 1, 3, 2], [0, 1, 2, 3, 4, 5], [3, 2, 5, 0, 4, 1]])
    for layers, mlp, features in KNOBS:
        g = tiny_sampler(base, pairing=pairing, layers=layers, mlp=mlp, features=features)
        h_0 = g.on(base).hidden(one)
        h_1 = g(h_0, one)
        assert h_1.shape[-1] == h_0.shape[-1] == 32 * (1 + len(features))
        stale = g.keys(h_0, one)
        assert len(stale.kept) == layers
        for h_BLD, state in ((h_0, one), (h_1, two)):
            whole = g(h_BLD, state)
            want, close = at_columns(whole, column_BN), {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(g.rows(h_BLD, state, column_BN, g.keys(h_BLD, state)), want, **close)
            torch.testing.assert_close(g(h_BLD, state, column_BN), want, **close)
        got = g.rows(h_1, two, every_BN, stale)
        torch.testing.assert_close(got, at_columns(g(h_1, two), every_BN), **close)
        for kept, new in zip(stale.kept, g.keys(h_1, two).kept, strict=True):  # made anew, in place
            torch.testing.assert_close(kept, new, **close)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_other_columns_keep_what_they_left_in_every_layer(layers: int) -> None:
    """A second step at columns 1 and 4 by hand: before every layer the others hold what the first step put there."""
    base, one = tiny_base("dream"), some_state([6, 6, 6])
    g, two = tiny_sampler(base, layers=layers), after(one, [4, 4, 4])
    h_0, column_BN = base.hidden(one), torch.tensor([[1, 4]] * 3)
    h_1, at_L = g(h_0, one), torch.tensor([False, True, False, False, True, False])
    entered = g.mix(torch.cat([g.norm_embed(base.to_frame(base.embed(one.tokens_BL), one)), g.norm_hidden(h_0)], -1))
    fresh = g.mix(torch.cat([g.norm_embed(base.to_frame(base.embed(two.tokens_BL), two)), g.norm_hidden(h_1)], -1))
    for layer in g.layers:
        mixed = torch.where(at_L[:, None], fresh, entered)
        entered, fresh = layer(entered, one), layer(mixed, two)
    want = at_columns(h_1 + g.norm_out(fresh), column_BN)
    got = g.rows(h_1, two, column_BN, g.keys(h_0, one))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
def test_columns_that_fill_up_leave_no_trace(layers: int) -> None:
    base, one = tiny_base("dream"), some_state([6, 6, 6])
    g, two = tiny_sampler(base, layers=layers), after(one, [4, 4, 4])
    h_0 = base.hidden(one)
    h_1, some, more = g(h_0, one), g.keys(h_0, one), g.keys(h_0, one)
    column_BN, valid_BN = torch.tensor([[1, 4, 2]] * 3), torch.tensor([[True, True, False]] * 3)
    want = g.rows(h_1, two, column_BN[:, :2], some)
    got = g.rows(h_1, two, column_BN, more, valid_BN)
    torch.testing.assert_close(got[:, :2], want, rtol=1e-5, atol=1e-5)
    for a, b in zip(some.kept, more.kept, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# Files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[TransformerBase, Sampler, Path]:
    base = tiny_base("dream")
    sampler = tiny_sampler(base, pairing="token")
    sampler.save(tmp_path / "g", steps=300)
    return base, sampler, tmp_path / "g"


def edit_config(folder: Path, change: Callable[[dict], None]) -> None:
    facts = json.loads((folder / CONFIG).read_text())
    change(facts)
    (folder / CONFIG).write_text(json.dumps(facts))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = safetensors.torch.load_file(folder / WEIGHTS)
    change(weights)
    safetensors.torch.save_file(weights, folder / WEIGHTS)


def test_a_saved_g_comes_back(saved) -> None:
    base, sampler, folder = saved
    assert sorted(p.name for p in folder.iterdir()) == [CONFIG, WEIGHTS]
    loaded = load_sampler(folder, base)
    assert loaded.config == sampler.config
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    for name, value in sampler.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16().float())  # stored in bf16
    loaded.save(folder / "again")
    twice = load_sampler(folder / "again", base)
    state = left_pad(ROWS)
    assert torch.equal(twice(base.hidden(state), state), loaded(base.hidden(state), state))
    facts = json.loads((folder / CONFIG).read_text())
    assert (facts["steps"], facts["base_fingerprint"]) == (300, base.fingerprint)


def test_a_loaded_g_takes_the_dtype_of_its_base(saved) -> None:
    base, _, folder = saved
    half = type(base)(tiny_base("dream").model.bfloat16(), base.head_matrix.bfloat16(), base.spec, next_frame=True)
    loaded = load_sampler(folder, half)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    state = left_pad(ROWS)
    assert loaded(half.hidden(state), state).dtype == torch.bfloat16


def test_a_g_of_another_base_is_refused_by_fingerprint(saved) -> None:
    base, _, folder = saved
    other = tiny_base("dream", seed=1)
    said = f"belongs to a base with fingerprint {base.fingerprint[:16]}; base 'dream' has {other.fingerprint[:16]}"
    with pytest.raises(InputError, match=said):
        load_sampler(folder, other)
    with pytest.raises(InputError, match="base 'exact' has exact-"):
        load_sampler(folder, exact_base())


def test_a_folder_without_a_sampler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"holds no sampler \({CONFIG} is missing\)"):
        load_sampler(tmp_path, exact_base())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("mix.bias"), r"Missing key\(s\) in state_dict: .mix\.bias"),
        (lambda w: w.update(surplus=torch.ones(3)), r"Unexpected key\(s\) in state_dict: .surplus"),
        (lambda w: w.update({"mix.bias": torch.ones(31)}), r"size mismatch for mix\.bias: .*\[31\].*\[32\]"),
        (
            lambda w: w.update({"mix.bias": torch.ones(32, dtype=torch.int8)}),
            rf"{WEIGHTS}: mix\.bias is I8; weights must be one of F16, BF16, F32, F64$",
        ),
        (
            lambda w: w.update({"mix.bias": torch.full((32,), float("nan"))}),
            rf"{WEIGHTS}: mix\.bias holds numbers that are not finite in torch\.float32; download it again$",
        ),
        (
            lambda w: w.update({"mix.bias": w["mix.bias"].to(torch.float8_e4m3fn)}),
            r"mix\.bias is F8_E4M3; weights must be one of",
        ),
    ],
)
def test_a_missing_extra_misshapen_or_integer_tensor_is_named(saved, change, said: str) -> None:
    base, _, folder = saved
    edit_weights(folder, change)
    with pytest.raises(InputError, match=said):
        load_sampler(folder, base)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_weight_file_is_refused(saved, size: int) -> None:
    base, _, folder = saved
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:size])
    with pytest.raises(InputError, match=f"cannot read the sampler weights {folder / WEIGHTS}"):
        load_sampler(folder, base)


def test_a_missing_weight_file_is_refused(saved) -> None:
    base, _, folder = saved
    (folder / WEIGHTS).unlink()
    with pytest.raises(InputError, match=f"cannot read the sampler weights {folder / WEIGHTS}"):
        load_sampler(folder, base)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f["config"].update(depth=2, width=3), r"unknown settings \['depth', 'width'\]"),
        (lambda f: f["config"].update(pairing="both"), "pairing is 'both'; it must be one of state, token"),
        (lambda f: f.pop("config"), "not a sampler config"),
        (lambda f: f.pop("base_fingerprint"), "not a sampler config"),
        (lambda f: f.update(config=None), "not a sampler config"),
    ],
)
def test_a_bad_config_is_refused_by_name(saved, change, said: str) -> None:
    base, _, folder = saved
    edit_config(folder, change)
    with pytest.raises(InputError, match=said):
        load_sampler(folder, base)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe\x00"])
def test_a_config_that_is_not_json_is_refused(saved, content: bytes) -> None:
    base, _, folder = saved
    (folder / CONFIG).write_bytes(content)
    with pytest.raises(InputError, match=f"{folder / CONFIG} (is not JSON|holds a list)"):
        load_sampler(folder, base)


@pytest.mark.parametrize("full_at", ["weights", "config"])
def test_a_full_disk_leaves_the_old_files_whole(saved, monkeypatch, full_at: str) -> None:
    base, _, folder = saved
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    calls = iter(["weights", "config"])

    def fsync(_: int) -> None:
        if next(calls) == full_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=rf"cannot write .*{WEIGHTS if full_at == 'weights' else CONFIG}: No space left"):
        tiny_sampler(base, seed=1).save(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before  # nothing changed, no part file left
    monkeypatch.undo()
    load_sampler(folder, base)
