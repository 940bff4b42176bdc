"""NLL under an autoregressive judge: by-hand values, an independent loop, and no dependence on batches."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from adjust_dlm.bases import cut_at_end
from adjust_dlm.eval import nll as module
from adjust_dlm.eval.nll import NllScore, gap_closed, right_padded, score_nll, summarize
from adjust_dlm.types import InputError

START = 0
CPU = torch.device("cpu")


class Bigram(nn.Module):
    """A judge known by hand: hidden state = one-hot of the token, head = log P(next | token)."""

    device = CPU

    def __init__(self, log_p_VV: torch.Tensor) -> None:
        super().__init__()
        size = len(log_p_VV)
        self.config = SimpleNamespace(vocab_size=size)
        self.embedding = nn.Embedding.from_pretrained(torch.eye(size))
        self.head = nn.Linear(size, size, bias=False)
        self.head.weight.data = log_p_VV.T.contiguous()
        self.eval()

    def base_model(self, input_ids, use_cache):
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head


def bigram(steps: list[tuple[int, int, float]], size: int) -> Bigram:
    """A bigram judge whose NLL of each step (from, to) is the given one; the rest of each row is shared evenly."""
    p_VV = torch.full((size, size), 1 / size, dtype=torch.float64)
    for here, there, nll in steps:
        p_VV[here] = (1 - math.exp(-nll)) / (size - 1)
        p_VV[here, there] = math.exp(-nll)
    return Bigram(p_VV.log().float())


def score(model, texts: list[list[int]], batch_size: int = 4) -> NllScore:
    return score_nll(model, texts, condition_id=START, batch_size=batch_size)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(61, size=n).tolist() for n in (3, 8, 1, 0, 13, 1, 5, 20, 8, 0, 2)]


def naive_nll(model: LlamaForCausalLM, ids: list[int]) -> list[float]:
    """One full forward per token, unbatched, in fp64 from the logits on."""
    out = []
    for i, token in enumerate(ids):
        with torch.no_grad():
            logits = model(torch.tensor([[START, *ids[:i]]])).logits[0, -1].double().numpy()
        out.append(float(np.log(np.exp(logits).sum()) - logits[token]))
    return out


def test_h12_token_mean_by_hand() -> None:
    model = bigram(
        [(0, 1, 0.1), (1, 2, 0.2), (2, 3, 0.1), (4, 5, 0.5), (5, 6, 0.1), (6, 7, 0.4), (7, 8, 0.2)],
        size=9,
    )
    # Both texts follow the start id 0, so the second one's first token takes what is left of row 0.
    first = -math.log((1 - math.exp(-0.1)) / 8)
    got = score(model, [[1, 2, 3], [4, 5, 6, 7, 8]])
    assert got.sum_nll_N == pytest.approx([0.4, first + 1.2], abs=1e-6)
    assert got.nll == pytest.approx((1.6 + first) / 8, abs=1e-6)
    # The case's own numbers: [.1,.2,.1] and [.3,.5,.1,.4,.2].
    by_hand = summarize([0.4, 1.5], [3, 5])
    assert by_hand.nll == pytest.approx(0.2375, abs=1e-12)


def test_h12_same_numbers_for_every_batch_size(llama, texts) -> None:
    alone = score(llama, texts, batch_size=1)
    for batch_size in (2, 3, 4, 11, 100):
        batched = score(llama, texts, batch_size)
        assert batched.sum_nll_N == pytest.approx(alone.sum_nll_N, rel=2e-6)
        assert batched.nll == pytest.approx(alone.nll, rel=1e-6)
        assert batched.ci95 == pytest.approx(alone.ci95, rel=1e-5)


def test_equals_naive_loop(llama, texts) -> None:
    tokens = [naive_nll(llama, ids) for ids in texts]
    got = score(llama, texts)
    assert got.sum_nll_N == pytest.approx([sum(t) for t in tokens], rel=1e-5)
    assert got.nll == pytest.approx(sum(map(sum, tokens)) / 61, rel=1e-6)
    assert got.tokens_N.tolist() == [3, 8, 1, 0, 13, 1, 5, 20, 8, 0, 2]
    assert (got.n_texts, got.n_empty, got.n_tokens) == (9, 2, 61)


def test_h12_one_token_text_is_scored_given_the_start_id(llama) -> None:
    got = score(llama, [[7]])
    assert got.nll == pytest.approx(naive_nll(llama, [7])[0], rel=1e-6)
    assert (got.n_texts, got.n_tokens) == (1, 1)
    assert math.isnan(got.ci95)


def test_head_in_chunks_changes_nothing(llama, texts, monkeypatch) -> None:
    whole = score(llama, texts)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 3 * 61)
    sizes = []
    head = llama.get_output_embeddings()
    hook = head.register_forward_hook(lambda _m, _i, out: sizes.append(out.shape[:-1].numel()))
    chunked = score(llama, texts)
    hook.remove()
    assert max(sizes[2:]) == 3  # the first two are the probe's
    assert chunked.sum_nll_N == pytest.approx(whole.sum_nll_N, rel=1e-6)


def test_bf16_judge_scores_its_own_logits_in_fp32(texts) -> None:
    model = bigram([(0, 1, 0.1)], size=61).to(torch.bfloat16)
    rows = torch.log_softmax(model.head.weight.T.float(), -1)
    expected = [sum(-rows[a, b].item() for a, b in zip([START, *t], t, strict=False)) for t in texts]
    assert score(model, texts).sum_nll_N == pytest.approx(expected, rel=1e-6)


def test_interval_is_that_of_the_ratio() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(20, 200, size=400)
    sums = tokens * rng.normal(4, 0.5, size=400)
    got = summarize(sums, tokens)
    # Delta method: the standard error of a ratio of means, from the residuals.
    residual = sums - got.nll * tokens
    expected = 1.96 * residual.std(ddof=1) / math.sqrt(400) / tokens.mean()
    assert got.ci95 == pytest.approx(expected, rel=0.1)
    assert summarize(sums, tokens).ci95 == got.ci95
    assert summarize([2.0, 4.0, 6.0], [1, 2, 3]).ci95 == pytest.approx(0, abs=1e-12)


def test_empty_texts_are_counted_and_change_nothing_else() -> None:
    plain = summarize([0.4, 1.5], [3, 5])
    padded = summarize([0.4, 0.0, 1.5, 0.0], [3, 0, 5, 0])
    assert (padded.nll, padded.ci95, padded.n_texts, padded.n_tokens) == (plain.nll, plain.ci95, 2, 8)
    assert (plain.n_empty, padded.n_empty) == (0, 2)


def test_gap_closed_by_hand() -> None:
    def at(nll: float) -> NllScore:
        return summarize([nll * 10, nll * 30], [10, 30])

    found = gap_closed(at(3.85), at(5.30), at(4.56))
    assert found["gap_closed"] == pytest.approx((5.30 - 4.56) / (5.30 - 3.85))
    assert found["gap_closed_ci95"] == pytest.approx(0, abs=1e-9)
    assert set(gap_closed(at(4.0), at(4.0), at(3.0)).values()) == {None}


def test_gap_closed_pairs_texts() -> None:
    rng = np.random.default_rng(4)
    tokens = np.full(200, 50)
    hard = rng.normal(0, 1, size=200)  # what the three share: text i's prompt

    def at(nll: float) -> NllScore:
        return summarize(tokens * (nll + hard), tokens)

    paired = gap_closed(at(4.0), at(6.0), at(5.0))
    assert tuple(paired.values()) == pytest.approx((0.5, 0.0), abs=1e-9)


def test_cut_at_end() -> None:
    assert cut_at_end([5, 6, 2, 7, 1], {1, 2}) == [5, 6]
    assert cut_at_end([2, 5], [2]) == []
    assert cut_at_end((5, 6), {1, 2}) == [5, 6]


def test_right_padded_covers_every_text_once() -> None:
    lists = [[5], [6, 7, 8], [], [9, 10]]
    batches = list(right_padded(lists, 2, CPU, [[3], [3], [3], [4, 5, 3]]))
    assert [rows for rows, _, _ in batches] == [[3, 1], [0]]
    _, ids_BL, real_BL = batches[0]
    assert ids_BL.tolist() == [[4, 5, 3, 9, 10], [3, 6, 7, 8, 0]]
    assert real_BL.tolist() == [[False] * 3 + [True] * 2, [False, True, True, True, False]]


def test_a_bidirectional_judge_is_refused(llama) -> None:
    model = copy.deepcopy(llama)
    model.config.is_causal = False
    with pytest.raises(InputError, match="later tokens"):
        score(model, [[1, 2]])


def test_a_judge_that_scales_its_logits_is_refused() -> None:
    model = bigram([(0, 1, 0.1)], size=5)
    plain = model.forward
    model.forward = lambda input_ids, use_cache: SimpleNamespace(logits=plain(input_ids, use_cache).logits * 0.5)
    with pytest.raises(InputError, match="changes the logits"):
        score(model, [[1, 2]])


@pytest.mark.parametrize(
    ("texts", "batch_size", "message"),
    [
        ([], 1, "none of the 0 texts"),
        ([[], []], 1, "none of the 2 texts"),
        ([[1]], 0, "batch_size is 0"),
        ([[1], [61]], 1, r"text 1 has token id \[61\]; the judge knows 0..60"),
        ([[-1]], 1, r"text 0 has token id \[-1\]"),
        ([[1] * 24], 1, "text 0 takes 25 positions; the judge has 24"),
    ],
)
def test_bad_input_is_named(llama, texts, batch_size, message) -> None:
    with pytest.raises(InputError, match=message):
        score(llama, texts, batch_size)


def test_bad_judge_is_named(llama) -> None:
    with pytest.raises(InputError, match=r"text 0 has token id \[61\]; the judge knows 0..60"):
        score_nll(llama, [[1]], condition_id=61, batch_size=1)
    with pytest.raises(InputError, match="LlamaModel has no output embedding"):
        score(LlamaModel(llama.config).eval(), [[1]])
    llama.train()
    with pytest.raises(InputError, match="training mode"):
        score(llama, [[1]])
    llama.eval()
