"""The recipe that says how many tokens `verified` commits a wait, against the decoder's own rounds."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm import DecodeConfig
from adjust_dlm.decoders import decode
from adjust_dlm.sampling import EVALUATION_ROWS, gumbel
from adjust_dlm.types import State
from helpers import BOS, exact_base, load_recipe, oracle, tiny_base


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("verified")


@pytest.mark.parametrize(("family", "block"), [("llada", None), ("dream", 4), ("llada", 4)])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_token_for_token_it_counts_the_rounds_of_every_text(
    recipe: ModuleType, family: str, block: int | None, temperature: float
) -> None:
    base = tiny_base(family, block=block)
    prompts = [[BOS, 5], [BOS, 6, 7, 8], [BOS, 4, 4, 4, 5, 6], [BOS]]
    config = DecodeConfig(max_new_tokens=11, temperature=temperature, suppress_eos=True, order="entropy")

    def g(h_BLD: Tensor, state: State) -> Tensor:
        return (base.hidden(state) + h_BLD) / 2  # right now and then

    found = recipe.measure(base, {"g": g, "stale": None}, config, prompts, (2, 8), batch=3)
    fewer = 0
    for depth in (2, 8):
        for who, drafts in (("g", g), ("stale", lambda h_BLD, _state: h_BLD)):
            how: dict[str, Any] = {"decoder": "verified", "sampler": drafts, "depth": depth}
            rounds_B = decode(base, prompts, config, rows=[EVALUATION_ROWS + n for n in range(4)], **how).rounds_B
            assert found[who, "token", depth].tolist() == rounds_B.tolist()
            fewer += int((11 - rounds_B).sum())
    assert fewer > 0  # some drafts stood


def test_its_expectation_is_the_mean_of_the_decoder(recipe: ModuleType) -> None:
    base, other = exact_base(3, 5), oracle(exact_base(3, 5, seed=4))
    config, prompts = DecodeConfig(max_new_tokens=5), [list[int]()] * 1500
    found = recipe.measure(base, {"g": other}, config, prompts, (2, 4), batch=1500)
    for depth in (2, 4):
        how: dict[str, Any] = {"decoder": "verified", "sampler": other, "depth": depth, "match": "law"}
        ours_B, decoded_B = found["g", "law", depth], decode(base, prompts, config, **how).rounds_B.double()
        error = float((ours_B.var() + decoded_B.var()) / 1500) ** 0.5
        assert abs(float(ours_B.mean() - decoded_B.mean())) < 4 * error
        assert float(ours_B.mean()) < 4.9
    true = recipe.measure(base, {"g": oracle(base)}, config, prompts[:9], (4,))
    for match in recipe.MATCHES:
        assert true["g", match, 4].tolist() == pytest.approx([2.0] * 9, abs=1e-4)
        wanted, stood = true["g", match, 4, "seen"].sum(-1)
        assert torch.allclose(wanted, stood, atol=1e-3) and wanted.tolist() == pytest.approx([9.0] * 3, abs=1e-3)


def test_shared_noise(recipe: ModuleType) -> None:
    p_RV, q_RV = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).double(), torch.tensor([[0.2, 0.2, 0.0, 0.6]]).double()
    noise_NV = gumbel(torch.rand(200_000, 4, generator=torch.Generator().manual_seed(0)).double())
    of_p_N, of_q_N = ((x.log() + noise_NV).argmax(-1) for x in (p_RV, q_RV))
    for token in (0, 1, 2):
        mine_N = of_p_N == token
        share = float((of_q_N[mine_N] == token).double().mean())
        assert float(recipe.shared_noise(p_RV, q_RV, torch.tensor([token]))) == pytest.approx(share, abs=0.01)
