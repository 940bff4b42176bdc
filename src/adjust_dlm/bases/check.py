"""Does a new base keep the protocol? `check_base` asks everything that decoding and training rely on.

Run it on a base of a new family before anything else: each fault here would otherwise show as slightly worse text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adjust_dlm.bases.base import Base
from adjust_dlm.bases.shape import Shape
from adjust_dlm.types import State, require


def check_base(base: Base, prompts: Sequence[Sequence[int]], *, padding: bool = True, tolerance: float = 1e-4) -> None:
    """Runs every check that needs no trained weights. Use fp32: bf16 rounding hides faults.

    Args:
        base: the new base.
        prompts: whole canvases, token ids with masks among given tokens (at least one given token on each side of a
            mask); of different lengths when `padding` is on.
        padding: False for a base that takes canvases of one length only.
        tolerance: largest difference of logits that rounding may make.

    Raises:
        InputError: what is wrong, and where; or prompts that cannot show it.
    """
    rows = [list(prompt) for prompt in prompts]
    _check_prompts(base, rows, padding)
    _check_facts(base)
    _check_states(base, rows[0])
    _check_logits(base, rows[0])
    alone = [_log_p(base, _state(base, [row]))[0] for row in rows]
    for row, alone_LV in zip(rows, alone, strict=True):
        _check_both_ways(base, row, alone_LV)
        for what, state in (
            ("a neighbour in the batch", _state(base, [row, row[::-1]])),
            ("an all-true mask (padded=True)", _state(base, [row], padded=True)),
        ):
            _check_same(alone_LV, _log_p(base, state)[0], tolerance, what, row)
    if padding:
        batch_BLV, other_BLV = (_log_p(base, _state(base, rows, pad=pad)) for pad in (None, _allowed(base)[-1]))
        why = "left padding (pads are seen, or positions do not start at 0 on the first real token)"
        for b, (row, alone_LV) in enumerate(zip(rows, alone, strict=True)):
            _check_same(alone_LV, batch_BLV[b, -len(row) :], tolerance, why, row)
            _check_same(batch_BLV[b, -len(row) :], other_BLV[b, -len(row) :], tolerance, "what pads hold", row)


def check_frame(base: Base, texts: Sequence[Sequence[int]]) -> None:
    """Row i must score token i. Needs a trained base and whole texts as token ids, without masks.

    Each token is masked in turn; its own row must give it a larger mean log-probability than the row before
    and the row behind do. A shifted family without its shift (or with one too many) fails.

    Raises:
        InputError: a neighbour's row fits better.
    """
    mean = {-1: 0.0, 0: 0.0, 1: 0.0}  # nats a token: of all texts, those of different lengths count alike
    for text in texts:
        require(len(text) >= 3, f"a text of {len(text)} tokens; the frame shows from 3 on")
        places = torch.arange(1, len(text) - 1)
        tokens_NL = torch.tensor(text).repeat(len(places), 1)
        tokens_NL[range(len(places)), places] = base.spec.mask_id
        log_p_NLV = _log_p(base, _state(base, tokens_NL.tolist())).cpu()
        truth_N = torch.tensor(text)[places]
        for ahead in mean:
            seen_N = log_p_NLV[range(len(places)), places + ahead, truth_N].clamp_min(-60)
            mean[ahead] += float(seen_N.mean()) / len(texts)
    best = max(mean, key=lambda ahead: mean[ahead])
    require(
        best == 0,
        f"row i{best:+d} fits token i best ({mean[best]:.2f} nats a token, row i {mean[0]:.2f}): hidden is not in the "
        "scoring frame",
    )


def _state(base: Base, rows: Sequence[Sequence[int]], *, pad: int | None = None, padded: bool = False) -> State:
    """Left-padded rows; `pad` is what the pads hold, `padded` gives an attention mask even if there are none."""
    length = max(len(row) for row in rows)
    pad = base.spec.pad_id if pad is None else pad
    tokens_BL = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows], device=base.device)
    real_BL = torch.tensor([[j >= length - len(row) for j in range(length)] for row in rows], device=base.device)
    masked_BL = (tokens_BL == base.spec.mask_id) & real_BL
    return State(tokens_BL, real_BL, masked_BL, padded=padded or not bool(real_BL.all()))


def _log_p(base: Base, state: State) -> Tensor:
    """Log-probabilities of every position [B, L, V]."""
    h_BLD = base.by_position(base.hidden(state), state)
    return base.logits(h_BLD.flatten(0, 1)).view(*h_BLD.shape[:2], -1).log_softmax(-1)


def _gap(a: Tensor, b: Tensor) -> float:
    """Largest difference of probabilities' logarithms; forbidden in both is equal."""
    return float(torch.where(a == b, 0, (a - b).abs()).max())


def _allowed(base: Base) -> list[int]:
    """Ids that can be committed."""
    row_1V = base.logits(torch.zeros(1, base.width, dtype=base.dtype, device=base.device))
    return [int(i) for i in (row_1V[0] > -torch.inf).nonzero()[:, 0]]


def _check_prompts(base: Base, rows: list[list[int]], padding: bool) -> None:
    require(len(rows) >= 2, f"{len(rows)} prompts; give at least 2")
    for n, row in enumerate(rows):
        given, masked = _places(base, row)
        require(
            bool(given and masked) and given[0] < masked[0] < given[-1],
            f"prompt {n} needs a mask with given tokens on both sides; it is {row}",
        )
    lengths = {len(row) for row in rows}
    require(not padding or len(lengths) > 1, f"all prompts have {min(lengths)} tokens; padding shows with two lengths")


def _places(base: Base, row: list[int]) -> tuple[list[int], list[int]]:
    """Positions of given tokens, and of masks."""
    mask = base.spec.mask_id
    return [i for i, token in enumerate(row) if token != mask], [i for i, token in enumerate(row) if token == mask]


def _check_facts(base: Base) -> None:
    shape, size = tuple(base.head_matrix.shape), base.spec.vocab_size
    require(shape == (size, base.width), f"head_matrix is {shape}; spec and width say {(size, base.width)}")
    require(not base.head_matrix.requires_grad, "head_matrix wants gradients; the base is frozen: detach it")
    good = len(str(base.fingerprint)) >= 8
    require(good, f"fingerprint is {base.fingerprint!r}; a sampler names its base by it: give a digest of the weights")
    width = Shape.of(base.layer_config).hidden_size
    require(width == base.width, f"layer_config has hidden_size {width}, the base {base.width}")


def _check_states(base: Base, row: list[int]) -> None:
    state = _state(base, [row])
    before = state.tokens_BL.clone()
    h_BLD, again_BLD, e_BLD = base.hidden(state), base.hidden(state), base.embed(state.tokens_BL)
    wanted = (1, len(row), base.width)
    require(tuple(h_BLD.shape) == wanted, f"hidden gives {tuple(h_BLD.shape)}; one row for each position is {wanted}")
    require(h_BLD.dtype == base.dtype, f"hidden gives {h_BLD.dtype}; the base says dtype {base.dtype}")
    require(h_BLD.device == base.device, f"hidden gives states on {h_BLD.device}; the base says {base.device}")
    require(not h_BLD.requires_grad, "hidden keeps a graph; the base is frozen: compute it under torch.no_grad()")
    require(bool(h_BLD.isfinite().all()), "hidden gives NaN or infinity")
    require(torch.equal(h_BLD, again_BLD), "two calls of hidden differ: is dropout on (call eval())?")
    require(torch.equal(before, state.tokens_BL), "hidden writes into the canvas it is given")
    moved = base.to_frame(h_BLD, state).shape
    require(moved == h_BLD.shape, f"to_frame gives {tuple(moved)} of {tuple(h_BLD.shape)}")
    require(tuple(e_BLD.shape) == wanted, f"embed gives {tuple(e_BLD.shape)}, wanted {wanted}")
    turned_BLD = base.embed(state.tokens_BL.flip(1)).flip(1)
    require(torch.equal(e_BLD, turned_BLD), "embed of a token depends on its place; give the token's own row alone")


def _check_logits(base: Base, row: list[int]) -> None:
    """What is forbidden, and that d logits / d h is W: training takes it to be, whatever else `head` does."""
    spec, h_RD = base.spec, base.hidden(_state(base, [row]))[0]
    kept_RD = h_RD.clone()
    plain_RV, logits_RV = base.head(h_RD).float(), base.logits(h_RD)
    wanted = (len(h_RD), spec.vocab_size)
    require(tuple(logits_RV.shape) == wanted, f"logits give {tuple(logits_RV.shape)}, wanted {wanted}")
    require(logits_RV.dtype == torch.float32, f"logits are {logits_RV.dtype}; order rules and draws want float32")
    require(torch.equal(h_RD, kept_RD), "logits write into the states they are given")
    require(not bool(logits_RV.isnan().any()), "logits hold NaN")
    same = torch.equal(base.plain_logits(h_RD).float(), logits_RV)
    require(same, "logits and plain_logits differ: override `forbid`, which both call, not `logits`")
    open_RV = logits_RV > -torch.inf
    require(bool((open_RV == open_RV[:1]).all()), "which tokens are forbidden differs from row to row")
    lost = [i for i in _allowed(base) if i == spec.mask_id or i >= spec.token_limit]
    require(not lost, f"tokens {lost[:5]} can be committed; the mask and ids from token_limit on must be -inf")
    require(bool(open_RV.any()), "every token is forbidden")
    same = torch.equal(logits_RV[open_RV], plain_RV[open_RV])
    require(same, "logits of allowed tokens are not those of head")
    left = [i for i in spec.end_ids if bool((base.logits(h_RD, suppress_eos=True)[:, i] > -torch.inf).any())]
    require(not left, f"end tokens {left} can be committed under suppress_eos")
    step_RD = torch.linspace(-1, 1, h_RD.numel(), device=base.device).view_as(h_RD).to(h_RD.dtype)
    said_RV = step_RD.float() @ base.head_matrix.float().T
    error = float((base.head(h_RD + step_RD).float() - plain_RV - said_RV).abs().max())
    limit = float(said_RV.abs().max() + plain_RV.abs().max()) * (1e-4 if base.dtype == torch.float32 else 0.05)
    require(
        error <= limit,
        f"head is not W h + constant with W = head_matrix: a step in h moves logits by up to {error:.3g} more than W "
        "says. What is not linear in the head belongs into hidden",
    )


def _check_both_ways(base: Base, row: list[int], before_LV: Tensor) -> None:
    """The first mask's row moves with the last given token (of its block, if not causal), the last's with the first."""
    given, masked = _places(base, row)
    size = base.spec.block or len(row)
    later = [place for place in given if place // size == masked[0] // size]
    lag = base.lag and masked[0] % size == 0  # scored by the block before
    require(
        base.spec.causal or (bool(later) and later[-1] > masked[0] and not lag),
        f"a prompt needs a mask with a given token behind it in the same block of {size}; it is {row}",
    )
    moves = [(given[0], masked[-1], "earlier")]
    for change, look, word in moves if base.spec.causal else [(later[-1], masked[0], "later"), *moves]:
        tokens = [i for i in _allowed(base) if i != row[change]][:8]  # one of these must make a difference
        others = [[*row[:change], token, *row[change + 1 :]] for token in tokens]
        moved = max(_gap(before_LV[look], _log_p(base, _state(base, [other]))[0, look]) for other in others)
        require(
            moved > 0,  # the same shapes are computed twice: what is not seen changes not one bit
            f"the row of position {look} does not see the {word} token at position {change}: is attention causal? "
            f"(canvas {row})",
        )


def _check_same(a_LV: Tensor, b_LV: Tensor, tolerance: float, what: str, row: list[int]) -> None:
    gap = _gap(a_LV, b_LV)
    require(gap <= tolerance, f"{what} moves a row's log-probabilities by {gap:.3g} (canvas {row})")
