"""Does a new base keep the protocol? `check_base` asks everything that decoding and training rely on.

Run it on a base of a new family before anything else: each fault here would otherwise show as slightly worse text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from adjust_dlm.bases.base import Base
from adjust_dlm.bases.layers import BidirectionalLayer
from adjust_dlm.bases.shape import Shape
from adjust_dlm.types import OrderOn, OrderRule, State, require


class ProtocolError(AssertionError):
    """The base breaks the protocol; the message says where."""


def check_base(base: Base, prompts: Sequence[Sequence[int]], *, padding: bool = True, tolerance: float = 1e-4) -> None:
    """Runs every check that needs no trained weights. Use fp32: bf16 rounding hides faults.

    Args:
        base: the new base.
        prompts: whole canvases, token ids with masks among given tokens (at least one given token on each side of a
            mask); of different lengths when `padding` is on.
        padding: False for a base that takes canvases of one length only.
        tolerance: largest difference of logits that rounding may make.

    Raises:
        ProtocolError: what is wrong, and where.
        InputError: prompts that cannot show it.
    """
    rows = [list(prompt) for prompt in prompts]
    _check_prompts(base, rows, padding)
    _check_spec(base)
    _check_shapes(base, rows)
    _check_forbidden(base, rows)
    _check_head_matrix(base, rows)
    _check_embed(base, rows)
    _check_layer_config(base)
    for row in rows:
        _check_both_ways(base, row)
    _check_batch(base, rows, tolerance)
    if padding:
        _check_padding(base, rows, tolerance)


def check_frame(base: Base, texts: Sequence[Sequence[int]]) -> None:
    """Row i must score token i. Needs a trained base and whole texts as token ids, without masks.

    Each token is masked in turn; its own row must give it a larger mean log-probability than the row before
    and the row behind do. A shifted family without its shift (or with one too many) fails.

    Raises:
        ProtocolError: a neighbour's row fits better.
    """
    sums = {-1: 0.0, 0: 0.0, 1: 0.0}
    count = 0
    for text in texts:
        require(len(text) >= 3, f"a text of {len(text)} tokens; the frame shows from 3 on")
        places = torch.arange(1, len(text) - 1)
        tokens_NL = torch.tensor(text).repeat(len(places), 1)
        tokens_NL[range(len(places)), places] = base.spec.mask_id
        log_p_NLV = _log_p(base, _state(base, tokens_NL.tolist())).cpu()
        truth_N = torch.tensor(text)[places]
        for ahead in sums:
            sums[ahead] += float(log_p_NLV[range(len(places)), places + ahead, truth_N].clamp_min(-60).sum())
        count += len(places)
    mean = {ahead: total / count for ahead, total in sums.items()}
    best = max(mean, key=lambda ahead: mean[ahead])
    _hold(
        best == 0,
        f"row i{best:+d} fits token i best ({mean[best]:.2f} nats a token, row i {mean[0]:.2f}): hidden is not in the "
        "scoring frame",
    )


def _hold(condition: bool, message: str) -> None:
    if not condition:
        raise ProtocolError(message)


def _state(base: Base, rows: Sequence[Sequence[int]], *, pad: int | None = None, padded: bool = False) -> State:
    """Left-padded rows; `pad` is what the pads hold, `padded` gives an attention mask even if there are none."""
    length = max(len(row) for row in rows)
    pad = base.spec.pad_id if pad is None else pad
    tokens_BL = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows], device=base.device)
    real_BL = torch.tensor([[j >= length - len(row) for j in range(length)] for row in rows], device=base.device)
    masked_BL = (tokens_BL == base.spec.mask_id) & real_BL
    return State(tokens_BL, real_BL, masked_BL, padded=padded or not bool(real_BL.all()))


def _log_p(base: Base, state: State) -> Tensor:
    """Log-probabilities of every row [B, L, V]."""
    h_BLD = base.hidden(state)
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
        given = [i for i, token in enumerate(row) if token != base.spec.mask_id]
        masked = [i for i, token in enumerate(row) if token == base.spec.mask_id]
        require(
            bool(given and masked) and given[0] < masked[0] < given[-1],
            f"prompt {n} needs a mask with given tokens on both sides; it is {row}",
        )
    lengths = {len(row) for row in rows}
    require(not padding or len(lengths) > 1, f"all prompts have {min(lengths)} tokens; padding shows with two lengths")


def _check_spec(base: Base) -> None:
    spec, size = base.spec, base.spec.vocab_size
    ids = {"mask_id": spec.mask_id, "pad_id": spec.pad_id} | {f"end_ids[{n}]": i for n, i in enumerate(spec.end_ids)}
    ids |= {} if spec.bos_id is None else {"bos_id": spec.bos_id}
    for name, value in ids.items():
        _hold(0 <= value < size, f"spec.{name} is {value}; ids run from 0 to {size - 1}")
    _hold(spec.mask_id not in spec.end_ids, f"the mask {spec.mask_id} is among the end tokens {spec.end_ids}")
    _hold(0 < spec.token_limit <= size, f"spec.token_limit is {spec.token_limit}; it must lie in 1..{size}")
    _hold(spec.order in get_args(OrderRule), f"spec.order is {spec.order!r}; known are {get_args(OrderRule)}")
    _hold(spec.order_on in get_args(OrderOn), f"spec.order_on is {spec.order_on!r}; known are {get_args(OrderOn)}")
    shape = tuple(base.head_matrix.shape)
    _hold(shape == (size, base.width), f"head_matrix is {shape}; spec and width say {(size, base.width)}")
    _hold(not base.head_matrix.requires_grad, "head_matrix wants gradients; the base is frozen: detach it")
    good = len(str(base.fingerprint)) >= 8
    _hold(good, f"fingerprint is {base.fingerprint!r}; a sampler names its base by it: give a digest of the weights")


def _check_shapes(base: Base, rows: list[list[int]]) -> None:
    state = _state(base, rows[:1])
    before = state.tokens_BL.clone()
    h_BLD, again_BLD = base.hidden(state), base.hidden(state)
    wanted = (1, len(rows[0]), base.width)
    _hold(tuple(h_BLD.shape) == wanted, f"hidden gives {tuple(h_BLD.shape)}; one row for each position is {wanted}")
    _hold(h_BLD.dtype == base.dtype, f"hidden gives {h_BLD.dtype}; the base says dtype {base.dtype}")
    _hold(h_BLD.device == base.device, f"hidden gives states on {h_BLD.device}; the base says {base.device}")
    _hold(not h_BLD.requires_grad, "hidden keeps a graph; the base is frozen: compute it under torch.no_grad()")
    _hold(bool(h_BLD.isfinite().all()), "hidden gives NaN or infinity")
    _hold(torch.equal(h_BLD, again_BLD), "two calls of hidden differ: is dropout on (call eval())?")
    _hold(torch.equal(before, state.tokens_BL), "hidden writes into the canvas it is given")
    moved = base.to_frame(h_BLD, state).shape
    _hold(moved == h_BLD.shape, f"to_frame gives {tuple(moved)} of {tuple(h_BLD.shape)}")


def _check_forbidden(base: Base, rows: list[list[int]]) -> None:
    spec = base.spec
    h_RD = base.hidden(_state(base, rows[:1]))[0]
    kept_RD = h_RD.clone()
    plain_RV, logits_RV = base.head(h_RD).float(), base.logits(h_RD)
    wanted = (len(h_RD), spec.vocab_size)
    _hold(tuple(logits_RV.shape) == wanted, f"logits give {tuple(logits_RV.shape)}, wanted {wanted}")
    _hold(logits_RV.dtype == torch.float32, f"logits are {logits_RV.dtype}; order rules and draws want float32")
    _hold(torch.equal(h_RD, kept_RD), "logits write into the states they are given")
    _hold(not bool(logits_RV.isnan().any()), "logits hold NaN")
    same = torch.equal(base.plain_logits(h_RD).float(), logits_RV)
    _hold(same, "logits and plain_logits differ: override `forbid`, which both call, not `logits`")
    closed_RV = logits_RV == -torch.inf
    _hold(bool((closed_RV == closed_RV[:1]).all()), "which tokens are forbidden differs from row to row")
    closed = set(closed_RV[0].nonzero()[:, 0].tolist())
    lost = sorted({spec.mask_id, *range(spec.token_limit, spec.vocab_size)} - closed)
    _hold(not lost, f"tokens {lost[:5]} can be committed; the mask and ids from token_limit on must be -inf in logits")
    _hold(len(closed) < spec.vocab_size, "every token is forbidden")
    open_ = [i for i in range(spec.vocab_size) if i not in closed]
    _hold(torch.equal(logits_RV[:, open_], plain_RV[:, open_]), "logits of allowed tokens are not those of head")
    ended_RV = base.logits(h_RD, suppress_eos=True)
    left = [i for i in spec.end_ids if bool((ended_RV[:, i] > -torch.inf).any())]
    _hold(not left, f"end tokens {left} can be committed under suppress_eos")


def _check_head_matrix(base: Base, rows: list[list[int]]) -> None:
    """Training takes d logits / d h to be W, whatever else `head` does."""
    h_RD = base.hidden(_state(base, rows[:1]))[0]
    step_RD = torch.linspace(-1, 1, h_RD.numel(), device=base.device).view_as(h_RD).to(h_RD.dtype)
    seen_RV = (base.head(h_RD + step_RD) - base.head(h_RD)).float()
    wanted_RV = step_RD.float() @ base.head_matrix.float().T
    error, scale = float((seen_RV - wanted_RV).abs().max()), float(wanted_RV.abs().max() + base.head(h_RD).abs().max())
    limit = scale * (1e-4 if base.dtype == torch.float32 else 0.05)
    _hold(
        error <= limit,
        f"head is not W h + constant with W = head_matrix: a step in h moves logits by up to {error:.3g} more than W "
        "says. What is not linear in the head belongs into hidden",
    )


def _check_embed(base: Base, rows: list[list[int]]) -> None:
    tokens_1L = torch.tensor(rows[:1], device=base.device)
    e_1LD = base.embed(tokens_1L)
    wanted = (1, len(rows[0]), base.width)
    _hold(tuple(e_1LD.shape) == wanted, f"embed gives {tuple(e_1LD.shape)}, wanted {wanted}")
    turned_1LD = base.embed(tokens_1L.flip(1)).flip(1)
    _hold(torch.equal(e_1LD, turned_1LD), "embed of a token depends on its place; give the token's own row alone")


def _check_layer_config(base: Base) -> None:
    """g's layer can be built, and takes and gives the base's width."""
    _hold(
        getattr(base.layer_config, "rms_norm_eps", None) is not None,
        f"layer_config is a {type(base.layer_config).__name__}; give a bases.layers.Shape",
    )
    shape = Shape.of(base.layer_config)
    _hold(shape.hidden_size == base.width, f"layer_config has hidden_size {shape.hidden_size}, the base {base.width}")
    with torch.random.fork_rng(devices=[]):
        layer = BidirectionalLayer(shape)
    state = State(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3).bool())
    with torch.no_grad():
        out = layer(torch.ones(1, 3, base.width), state)
    _hold(tuple(out.shape) == (1, 3, base.width), f"a layer of layer_config gives {tuple(out.shape)}")


def _check_both_ways(base: Base, row: list[int]) -> None:
    """The first mask's row moves with the last given token, and the last mask's with the first."""
    mask = base.spec.mask_id
    given = [i for i, token in enumerate(row) if token != mask]
    masked = [i for i, token in enumerate(row) if token == mask]
    before_LV = _log_p(base, _state(base, [row]))[0]
    for change, look, word in ((given[-1], masked[0], "later"), (given[0], masked[-1], "earlier")):
        moved = 0.0
        for token in [i for i in _allowed(base) if i != row[change]][:8]:  # some other token must make a difference
            other = [*row[:change], token, *row[change + 1 :]]
            moved = max(moved, _gap(before_LV[look], _log_p(base, _state(base, [other]))[0, look]))
        _hold(
            moved > 0,  # the same shapes are computed twice: what is not seen changes not one bit
            f"the row of position {look} does not see the {word} token at position {change}: is attention causal? "
            f"(canvas {row})",
        )


def _check_batch(base: Base, rows: list[list[int]], tolerance: float) -> None:
    """Neighbours of the same length, and an attention mask that hides nothing, change nothing."""
    for row in rows:
        neighbour = row[::-1]
        alone_LV = _log_p(base, _state(base, [row]))[0]
        together_LV = _log_p(base, _state(base, [row, neighbour]))[0]
        gap = _gap(alone_LV, together_LV)
        _hold(gap <= tolerance, f"a neighbour in the batch moves a row's log-probabilities by {gap:.3g} (canvas {row})")
        gap = _gap(alone_LV, _log_p(base, _state(base, [row], padded=True))[0])
        _hold(gap <= tolerance, f"an all-true mask (padded=True) moves log-probabilities by {gap:.3g} (canvas {row})")


def _check_padding(base: Base, rows: list[list[int]], tolerance: float) -> None:
    """Left pads are invisible, whatever they hold, and positions count from the first real token."""
    together_BLV = _log_p(base, _state(base, rows))
    other_BLV = _log_p(base, _state(base, rows, pad=_allowed(base)[-1]))
    for b, row in enumerate(rows):
        alone_LV = _log_p(base, _state(base, [row]))[0]
        gap = _gap(alone_LV, together_BLV[b, -len(row) :])
        _hold(
            gap <= tolerance,
            f"left padding moves log-probabilities by {gap:.3g}: pads are seen, or positions do not start at 0 on the "
            f"first real token (canvas {row})",
        )
        gap = _gap(together_BLV[b, -len(row) :], other_BLV[b, -len(row) :])
        _hold(gap <= tolerance, f"what pads hold moves log-probabilities by {gap:.3g} (canvas {row})")
