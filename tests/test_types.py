"""Settings are refused by name and value; states and trajectories are exact."""

import pytest
import torch

from adjust_dlm.types import GIVEN, MASKED, DecodeConfig, DecodeResult, InputError, State, Trajectory

COUNTS = "tokens_per_step", "max_new_tokens", "top_k", "candidates", "block_length", "cache_period"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("tokens_per_step", 0, "tokens_per_step is 0; it must be at least 1"),
        ("tokens_per_step", -3, "tokens_per_step is -3"),
        ("max_new_tokens", 0, "max_new_tokens is 0; it must be at least 1"),
        ("temperature", float("nan"), "temperature is nan; it must be a finite number >= 0"),
        ("temperature", float("inf"), "temperature is inf"),
        ("temperature", -0.1, "temperature is -0.1"),
        ("top_p", 0, r"top_p is 0; it must lie in \(0, 1\]"),
        ("top_p", 1.5, "top_p is 1.5"),
        ("top_p", float("nan"), "top_p is nan"),
        ("top_k", -1, "top_k is -1; it must be at least 0"),
        ("order", "best", "order is 'best'; it must be one of entropy, confidence, margin, random, left_to_right"),
        ("order_on", "cooked", "order_on is 'cooked'; it must be one of processed, raw"),
        *((name, 2**31, f"{name} is 2147483648; it must be at most 2147483647") for name in COUNTS),
        ("temperature", 10**400, "temperature is 1000"),
        ("schedule", None, "schedule is None; it must be one of exact, reference"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(field: str, value: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        DecodeConfig(**{field: value})
    with pytest.raises(InputError, match=said):  # a changed copy is checked again
        DecodeConfig().but(**{field: value})


def test_but_changes_only_what_it_is_told() -> None:
    config = DecodeConfig(seed=4, top_p=0.9)
    assert config.but(temperature=0) == DecodeConfig(seed=4, top_p=0.9, temperature=0)
    assert config == DecodeConfig(seed=4, top_p=0.9)
    with pytest.raises(InputError, match="unknown decode setting depth, width"):
        config.but(width=1, depth=2)


def test_positions_start_at_zero_on_the_first_real_token() -> None:
    real_BL = torch.tensor([[False, False, True, True], [True, True, True, True], [False, False, False, True]])
    state = State(torch.zeros(3, 4, dtype=torch.long), real_BL, torch.zeros(3, 4, dtype=torch.bool))
    assert state.positions_BL.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]]


TRAJECTORY = Trajectory(
    tokens_L=torch.tensor([5, 6, 7, 8, 1, 1]),
    order_L=torch.tensor([GIVEN, 2, 0, 1, 3, MASKED]),
    row=7,
    seed=3,
)


@pytest.mark.parametrize(
    ("t", "tokens", "masked"),
    [
        (0, [5, 9, 9, 9, 9, 9], [0, 1, 1, 1, 1, 1]),
        (1, [5, 9, 7, 9, 9, 9], [0, 1, 0, 1, 1, 1]),
        (2, [5, 9, 7, 8, 9, 9], [0, 1, 0, 0, 1, 1]),
        (3, [5, 6, 7, 8, 9, 9], [0, 0, 0, 0, 1, 1]),
        (4, [5, 6, 7, 8, 1, 9], [0, 0, 0, 0, 0, 1]),  # what was never committed stays masked
    ],
)
def test_a_state_is_the_canvas_before_its_commit(t: int, tokens: list[int], masked: list[int]) -> None:
    tokens_L, masked_L = TRAJECTORY.state(t, mask_id=9)
    assert (tokens_L.tolist(), masked_L.int().tolist()) == (tokens, masked)


def test_a_trajectory_has_one_state_more_than_commits() -> None:
    assert TRAJECTORY.commits == 4
    for t in (-1, 5):
        with pytest.raises(InputError, match=rf"state {t} does not exist; this trajectory has states 0\.\.4"):
            TRAJECTORY.state(t, mask_id=9)


def test_a_result_row_becomes_a_trajectory_without_its_pads() -> None:
    result = DecodeResult(
        tokens_BL=torch.tensor([[1, 1, 5, 6], [2, 3, 4, 5]]),
        order_BL=torch.tensor([[GIVEN, GIVEN, GIVEN, 0], [GIVEN, 1, 0, 2]]),
        real_BL=torch.tensor([[False, False, True, True], [True] * 4]),
        base_calls_B=torch.tensor([1, 3]),
        sampler_calls_B=torch.tensor([0, 0]),
        partner_calls_B=torch.tensor([0, 0]),
        rounds_B=torch.tensor([1, 1]),
        rows_B=torch.tensor([40, 41]),
        config=DecodeConfig(seed=12),
        decoder="joint",
    )
    first = result.trajectory(0)
    assert (first.tokens_L.tolist(), first.order_L.tolist(), first.row, first.seed) == ([5, 6], [GIVEN, 0], 40, 12)
    assert result.trajectory(1).commits == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens_per_step", 2.5), ("tokens_per_step", "four"), ("block_length", 2.5), ("candidates", 1.5),
        ("seed", None), ("top_p", "abc"), ("temperature", "hot"), ("suppress_eos", "no"), ("max_new_tokens", True),
    ],
)  # fmt: skip
def test_settings_of_another_type_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{field} is "):
        DecodeConfig(**{field: value})  # type: ignore[arg-type]
