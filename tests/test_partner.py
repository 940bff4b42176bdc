"""The autoregressive partner: one model read three ways, and the same rows whatever stands beside them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adjust_dlm.bases import BaseSpec
from adjust_dlm.bases.partner import CausalPartner, load_partner
from adjust_dlm.decoders import Canvas
from adjust_dlm.types import DecodeConfig, InputError
from helpers import END, LIMIT, MASK, VOCAB, conditionals, exact_base, left_pad, target, tiny_base
from tiny_ar import save_tiny, tiny_model, tiny_tokenizer

ROWS = [[3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14]]


def spec(**changes: object) -> BaseSpec:
    fields = vars(tiny_base("dream").spec) | changes
    return BaseSpec(**fields)


def partner(vocab: int = VOCAB) -> CausalPartner:
    return CausalPartner(tiny_model(vocab=vocab), spec(), name="tiny")


def test_a_row_in_a_padded_batch_reads_as_alone() -> None:
    ar, state = partner(), left_pad(ROWS)
    together_BLD = ar.hidden(state)
    for b, row in enumerate(ROWS):
        alone_LD = ar.hidden(left_pad([row]))[0]
        torch.testing.assert_close(together_BLD[b][state.real_BL[b]], alone_LD, atol=1e-5, rtol=1e-4)


def test_row_i_scores_token_i_given_those_before_it() -> None:
    """Against the model's own logits, one place later; masks on the right are never seen."""
    ar, row = partner(), [3, 4, 5, MASK, MASK]
    with torch.no_grad():
        expected_LV = ar.model(input_ids=torch.tensor([[3, 4, 5]])).logits[0]
    logits_LV = ar.logits(ar.hidden(left_pad([row]))[0, 1:4])
    allowed = [v for v in range(LIMIT) if v != MASK]
    torch.testing.assert_close(logits_LV[:, allowed], expected_LV[:, allowed], atol=1e-5, rtol=1e-4)
    assert logits_LV[:, [MASK, *range(LIMIT, VOCAB)]].isneginf().all()


@pytest.mark.parametrize("cuts", [(1,), (1, 2, 3, 4, 5), (2, 5)])
def test_reading_in_pieces_equals_reading_at_once(cuts: tuple[int, ...]) -> None:
    ar, state = partner(), left_pad(ROWS)
    whole_BLD, _ = ar.read(state.tokens_BL, state.real_BL)
    memory, parts = None, []
    for start, end in zip((0, *cuts), (*cuts, 6), strict=True):
        h_BND, memory = ar.read(state.tokens_BL[:, start:end], state.real_BL[:, :end], memory)
        parts.append(h_BND)
    real_BL = state.real_BL
    torch.testing.assert_close(torch.cat(parts, 1)[real_BL], whole_BLD[real_BL], atol=1e-5, rtol=1e-4)


def test_suppressed_ends_and_a_smaller_vocabulary() -> None:
    """A partner with fewer ids gives the base's other ones no chance; ids it cannot read are refused by number."""
    ar = partner(vocab=15)
    logits_RV = ar.logits(ar.hidden(left_pad([[3, 4]]))[0], suppress_eos=True)
    assert logits_RV.shape == (2, VOCAB)
    assert logits_RV[:, [END, *range(15, VOCAB)]].isneginf().all()
    assert logits_RV[:, 3:15].isfinite().all()
    with pytest.raises(InputError, match="ids up to 14, not 21"):
        ar.hidden(left_pad([[3, 21, 4]]))


def test_a_canvas_must_have_something_to_be_conditioned_on() -> None:
    ar, base, config = partner(), tiny_base("dream"), DecodeConfig(max_new_tokens=2)
    ar.require_start(Canvas(base, [[5], [6, 7]], config))
    with pytest.raises(InputError, match="begins with a mask"):
        ar.require_start(Canvas(base, [[5], []], config))


def test_the_exact_partner_is_the_joint_left_to_right() -> None:
    base = exact_base(words=3, length=4)
    ar, p = base.partner(), target(base)
    strings = list(p)[::7]
    state = left_pad([list(s) for s in strings], mask_id=base.spec.mask_id)
    p_BLV = ar.logits(ar.hidden(state).flatten(0, 1)).softmax(-1).view(len(strings), 4, -1)
    for b, s in enumerate(strings):
        for i in range(4):
            expected_V = conditionals(p, (*s[:i], *[None] * (4 - i)))[i]
            assert p_BLV[b, i, :3].numpy() == pytest.approx(expected_V, abs=1e-5)
    first_BD, memory = ar.read(state.tokens_BL[:, :1], state.real_BL[:, :1])
    rest_BND, _ = ar.read(state.tokens_BL[:, 1:], state.real_BL, memory)
    h_BLD, _ = ar.read(state.tokens_BL, state.real_BL)
    assert torch.equal(torch.cat([first_BD, rest_BND], 1), h_BLD)


def test_where_a_partner_comes_from(tmp_path: Path) -> None:
    """The exact base brings its own; any base takes a folder; one without either is told so."""
    assert load_partner(exact_base()).name == "exact"
    folder = str(save_tiny(tmp_path / "ar", vocab=VOCAB))
    base = tiny_base("dream")
    assert load_partner(base, folder).name == folder
    base.ar_source = folder
    assert load_partner(base).name == folder
    base.ar_source = None
    with pytest.raises(InputError, match="no autoregressive partner of its own"):
        load_partner(base)


def test_a_partner_with_other_ids_is_refused(tmp_path: Path) -> None:
    """By the ids of a text where both have a tokenizer, else by how many ids there are."""
    folder = str(save_tiny(tmp_path / "ar"))
    base = tiny_base("dream")
    with pytest.raises(InputError, match="another tokenizer"):
        load_partner(base, folder)
    base.tokenizer = tiny_tokenizer()
    assert load_partner(base, folder).name == folder
    base.tokenizer = SimpleNamespace(encode=lambda text, **_: [ord(c) for c in text])
    with pytest.raises(InputError, match="another tokenizer"):
        load_partner(base, folder)


def test_a_bidirectional_partner_is_refused() -> None:
    model = tiny_model()
    model.config.is_causal = False
    with pytest.raises(InputError, match="looks at later tokens"):
        CausalPartner(model, spec(), name="two-sided")
