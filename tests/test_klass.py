"""KLASS on distributions that are known pass by pass: what is committed when, and its limits."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.decoders import decode
from adjust_dlm.losses import kl_rows
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import BOS, FAMILIES, VOCAB, TableBase, exact_base, tiny_base

PROMPTS = [[BOS, 3], [BOS, 4, 5, 6, 7], [BOS]]


class Script(TableBase):
    """Pass t answers with p_TLV[t], whatever was committed; the last pass is repeated."""

    def __init__(self, p_TLV: Tensor) -> None:
        super().__init__(p_TLV[0].log())
        self._states = [TableBase(p_LV.log())._h_LD for p_LV in p_TLV]
        self._passes = 0

    def hidden(self, state: State) -> Tensor:
        self._h_LD = self._states[min(self._passes, len(self._states) - 1)]
        self._passes += 1
        return super().hidden(state)


def committed(p_TLV: Tensor, block_length: int | None = None, **options: Any) -> list[list[int]]:
    """Positions of each pass at T=0, best first."""
    base, length = Script(p_TLV), p_TLV.shape[1]
    seen: list[int] = []
    result = decode(
        base, [[]], DecodeConfig(max_new_tokens=length, temperature=0.0, block_length=block_length), decoder="klass",
        watch=lambda canvas: seen.append(int(canvas.commits_B[0])), **options,
    )  # fmt: skip
    assert int(result.base_calls_B[0]) == len(seen)
    ranked = result.order_BL[0].argsort().tolist()
    return [ranked[a:b] for a, b in zip([0, *seen[:-1]], seen, strict=True)]


def two(*first: float) -> Tensor:
    """A pass over two words, from the first one's probability at each position."""
    p_L = torch.tensor(first)
    return torch.stack([p_L, 1 - p_L], -1)


def test_what_is_committed_when_by_hand() -> None:
    """tau 0.9, KL below 0.01 twice in a row.

    Position 0 is sure and never moves. Position 1 moves until pass 2, so its second calm pass is pass 4. Position 2 is
    calm and unsure. Position 3 moves until pass 3. Nothing is ready in passes 0 and 1: they take the surest.
    """
    passes = [
        two(0.95, 0.95, 0.60, 0.97, 0.99, 0.98),
        two(0.95, 0.05, 0.60, 0.97, 0.99, 0.98),
        two(0.95, 0.95, 0.60, 0.50, 0.99, 0.98),
        two(0.95, 0.95, 0.60, 0.97, 0.99, 0.98),
        two(0.95, 0.95, 0.60, 0.97, 0.99, 0.98),
        two(0.95, 0.95, 0.60, 0.97, 0.99, 0.98),
    ]
    # 4 and 5 fall to the surest of passes 0 and 1. Pass 2: 0 has been calm twice. Pass 3: nothing is ready, 3 is the
    # surest. Pass 4: 1 has been calm twice. Pass 5: 2 is left.
    assert committed(torch.stack(passes)) == [[4], [5], [0], [3], [1], [2]]
    # Nothing falls early when several wait for their second calm pass.
    still = [two(0.92, 0.93, 0.94, 0.95, 0.96)] * 3
    assert committed(torch.stack(still)) == [[4], [3], [2, 1, 0]]
    assert committed(torch.stack(still), history=1) == [[4], [3, 2, 1, 0]]
    assert committed(torch.stack(still), history=0) == [[4, 3, 2, 1, 0]]
    assert committed(torch.stack(still), tau=0.935) == [[4], [3], [2], [1], [0]]


def test_the_probability_may_equal_tau() -> None:
    """3/4 is a float, and so is its softmax here."""
    p = torch.softmax(two(0.75, 0.75, 0.75, 0.75).log(), -1)[0, 0].item()
    still = torch.stack([two(0.75, 0.75, 0.75, 0.75)] * 3)
    assert committed(still, tau=p) == [[0], [1], [2, 3]]
    assert committed(still, tau=math.nextafter(p, 1)) == [[0], [1], [2], [3]]


def test_the_divergence_is_of_this_pass_from_the_one_before() -> None:
    """From 0.99 to 0.999: KL(now || before) is 0.0067, KL(before || now) 0.0141."""
    now, before = 0.999, 0.99
    kl = now * math.log(now / before) + (1 - now) * math.log((1 - now) / (1 - before))
    other = before * math.log(before / now) + (1 - before) * math.log((1 - before) / (1 - now))
    assert (round(kl, 4), round(other, 4)) == (0.0067, 0.0141)
    moves = torch.stack([two(0.9995, before, before), two(0.9995, now, now)])
    assert committed(moves, history=1, epsilon_kl=0.01) == [[0], [1, 2]]
    assert committed(moves, history=1, epsilon_kl=0.006) == [[0], [1], [2]]
    assert committed(moves.flip(0), history=1, epsilon_kl=0.01) == [[0], [1], [2]]
    tables = [TableBase(p_LV.log()) for p_LV in moves.flip(0)]
    same = kl_rows(*(base.logits(base._h_LD[1:]) for base in tables))[0].item()  # below it, and no more
    assert committed(moves, history=1, epsilon_kl=same) == [[0], [1], [2]]
    assert committed(moves, history=1, epsilon_kl=same * (1 + 1e-6)) == [[0], [1, 2]]


def test_positions_behind_the_block_are_watched_too() -> None:
    """They have been calm before it is their turn, so the second block goes at once."""
    still = torch.stack([two(0.92, 0.93, 0.94, 0.95)] * 3)
    assert committed(still, block_length=2, history=2) == [[1], [0], [3, 2]]


def naive(p_TLV: list[list[list[float]]], tau: float, epsilon: float, history: int) -> list[list[int]]:
    """The rule in plain Python: the last `history` divergences of a position, looked at anew each pass."""
    left, out, t = list(range(len(p_TLV[0]))), [], 0
    while left:
        now = [p_TLV[min(s, len(p_TLV) - 1)] for s in range(t + 1)]

        def kl(s: int, i: int, now: list[list[list[float]]] = now) -> float:
            return sum(p * math.log(p / q) for p, q in zip(now[s][i], now[s - 1][i], strict=True))

        calm = [i for i in left if t >= history and all(kl(s, i) < epsilon for s in range(t - history + 1, t + 1))]
        ready = [i for i in calm if max(now[t][i]) >= tau]
        surest = sorted(ready or left, key=lambda i: (-max(now[t][i]), i))
        out.append(surest if ready else surest[:1])
        left = [i for i in left if i not in out[-1]]
        t += 1
    return out


@pytest.mark.parametrize("history", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_walks_as_plain_python_has_them(seed: int, history: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    steps = 0.25 * torch.randn(12, 14, 4, generator=generator)
    steps[0] = 3 * torch.randn(14, 4, generator=generator)
    p_TLV = steps.cumsum(0).softmax(-1)
    expected = naive(p_TLV.double().tolist(), 0.55, 0.02, history)
    assert len(expected) < 14 and (len(expected[0]) == 1 or history == 0)
    assert committed(p_TLV, tau=0.55, epsilon_kl=0.02, history=history) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_limits_are_joint_decoding_and_the_threshold(family: str, temperature: float) -> None:
    base = tiny_base(family)
    config = DecodeConfig(
        max_new_tokens=8, temperature=temperature, suppress_eos=True, order="confidence", order_on="raw"
    )
    joint = decode(base, PROMPTS, config, decoder="joint")
    threshold = decode(base, PROMPTS, config, decoder="threshold", tau=0.3)
    assert threshold.base_calls_B.max() < 8
    for expected, options in (
        (joint, {"tau": 1.1}),
        (joint, {"tau": 0.3, "history": 99}),
        (joint, {"tau": 0.3, "epsilon_kl": 1e-12}),
        (threshold, {"tau": 0.3, "history": 0}),
        (threshold, {"tau": 0.3, "history": 0, "epsilon_kl": math.inf}),
    ):
        ours = decode(base, PROMPTS, config, decoder="klass", **options)
        for name in ("tokens_BL", "order_BL", "base_calls_B"):
            assert torch.equal(getattr(ours, name), getattr(expected, name)), (name, options)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_do_not_depend_on_their_batch(family: str) -> None:
    base, config = tiny_base(family), DecodeConfig(max_new_tokens=14)
    settings = {"decoder": "klass", "tau": 0.2, "epsilon_kl": 0.3}
    together = decode(base, PROMPTS, config, **settings)
    for row, prompt in enumerate(PROMPTS):
        alone = decode(base, [prompt], config, rows=[row], **settings)
        for name in ("tokens_BL", "order_BL"):
            assert torch.equal(getattr(together, name)[row, -len(prompt) - 14 :], getattr(alone, name)[0])
        assert together.base_calls_B[row] == alone.base_calls_B[0]
    assert together.base_calls_B.max() < 14


def test_logits_in_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base, config = tiny_base("llada"), DecodeConfig(max_new_tokens=14, suppress_eos=True)
    settings = {"decoder": "klass", "tau": 0.2, "epsilon_kl": 0.3}
    whole = decode(base, PROMPTS, config, **settings)
    monkeypatch.setattr("adjust_dlm.decoders.machinery.pick._CHUNK_BYTES", 4 * VOCAB * 12)
    widest: list[int] = []
    head = base.head
    monkeypatch.setattr(base, "head", lambda h_RD: widest.append(len(h_RD)) or head(h_RD))
    assert torch.equal(decode(base, PROMPTS, config, **settings).tokens_BL, whole.tokens_BL)
    assert max(widest) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tau": 0}, "tau is 0; it must be a finite number above 0"),
        ({"tau": math.inf}, "tau is inf"),
        ({"epsilon_kl": 0}, "epsilon_kl is 0; it must be above 0"),
        ({"epsilon_kl": math.nan}, "epsilon_kl is nan"),
        ({"history": -1}, "history is -1; it must be at least 0"),
        ({"history": 10**20}, "history is 100000000000000000000; it must be at most 2147483647"),
        ({"tau": 10**400}, "tau is 1000"),
        ({"history": 1.5}, "history is 1.5"),
        ({"history": math.inf}, "history is inf"),
        ({"history": "long"}, "history is 'long'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        decode(exact_base(), [[]], DecodeConfig(max_new_tokens=3), decoder="klass", **options)
