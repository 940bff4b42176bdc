"""MAUVE (Pillutla et al., NeurIPS 2021): how close the distribution of texts Q is to that of texts P.

Features of both sets are quantized together by k-means, and the two histograms are compared along all their
mixtures. The settings are those of the authors' release; the code is our own. Scores are comparable only at equal
settings, feature model, text length and n, so all of them travel with the score.

Shape suffixes: N rows of P and Q together, D features, W mixture weights, J buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from adjust_dlm.bases.partner import last_hidden, require_causal
from adjust_dlm.eval.nll import Floats, Ints, Tokens, require_ids, right_padded
from adjust_dlm.eval.settings import Pooling, check_clusters
from adjust_dlm.types import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

SMALL_N = 1000  # below it the score moves more with n and the seed than between decoders worth comparing
EXPLAINED_VARIANCE = 0.9
KMEANS_RUNS = 5
KMEANS_STEPS = 500
RESAMPLES = 200


def mauve(
    p_features: npt.ArrayLike, q_features: npt.ArrayLike, *, seeds: Sequence[int] = (0, 1, 2, 3, 4),
    buckets: int | None = None, scale: float = 5.0, about: Mapping[str, object] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """MAUVE of two sets of features.

    Args:
        p_features: [n_p, D] of the reference texts.
        q_features: [n_q, D] of the texts to judge.
        seeds: k-means seeds; one score each.
        buckets: clusters; None is a tenth of the smaller set, at least 2.
        scale: the constant c of exp(-c KL).
        about: what the caller knows and the score depends on (feature model, pooling, text length): kept in settings.

    Returns:
        `mauve`: mean over the seeds, in (0, 1]; 1 when P and Q are the same. `mauve_ci95`: half of its 95 % interval;
        texts of both sets resampled within their clusters, and the seeds' own spread. `per_seed`. `settings`:
        everything the numbers depend on, and `warnings`, a list of lines.

    Raises:
        InputError: features that are not finite [n, D] arrays of one D, no seeds, or an impossible bucket count.
    """
    p, q = np.asarray(p_features, np.float64), np.asarray(q_features, np.float64)
    shapes = f"features have shapes {list(p.shape)} and {list(q.shape)}"
    require(p.ndim == q.ndim == 2 and p.shape[1] == q.shape[1], f"{shapes}; both must be [n, D] of one D")
    require(min(p.size, q.size) > 0, f"{shapes}; there must be something to compare")
    require(bool(np.isfinite(p).all() and np.isfinite(q).all()), "features hold nan or infinity")
    buckets = max(2, round(min(len(p), len(q)) / 10)) if buckets is None else buckets
    most = len(p) + len(q)
    require(2 <= buckets <= most, f"buckets is {buckets}; it must be 2..{most}, the number of texts")
    check_clusters(seeds, scale)
    reduced_ND = reduce_features(np.concatenate([p, q]))
    labels = [_clusters(reduced_ND, buckets, seed) for seed in seeds]
    everyone = np.arange(len(p)), np.arange(len(q))
    per_seed = [_score(labels_N, *everyone, buckets, scale) for labels_N in labels]
    warnings = []
    if min(len(p), len(q)) < SMALL_N:
        warnings.append(f"MAUVE of {len(p)} and {len(q)} texts is noisy and off by chance; use {SMALL_N} or more")
    if len(p) != len(q):
        warnings.append(f"MAUVE of sets of unequal size ({len(p)} and {len(q)}) cannot be compared with equal ones")
    for line in warnings:
        log.warning(line)
    settings: dict[str, object] = {
        **(about or {}), "n_p": len(p), "n_q": len(q), "seeds": list(seeds), "buckets": buckets, "scale": scale,
        "explained_variance": EXPLAINED_VARIANCE, "dimensions": reduced_ND.shape[1], "kmeans_runs": KMEANS_RUNS,
        "kmeans_steps": KMEANS_STEPS, "warnings": warnings,
    }  # fmt: skip
    error = _error(labels, len(p), len(q), buckets, scale)
    spread = float(np.var(per_seed, ddof=1)) / len(seeds) if len(seeds) > 1 else 0.0
    half = 1.96 * (error**2 + spread) ** 0.5
    return {"mauve": float(np.mean(per_seed)), "mauve_ci95": half, "per_seed": per_seed, "settings": settings}


def features(
    model: PreTrainedModel, token_lists: Tokens, batch_size: int = 64, pooling: Pooling = "mean"
) -> npt.NDArray[np.float32]:
    """One vector per text: the last hidden states of a causal model, averaged over the tokens or of the last token.

    Args:
        model: any causal model of transformers, in eval mode.
        token_lists: the model's token ids, without end tokens and pads; empty lists are left out.
        batch_size: texts per pass; the result does not depend on it beyond rounding.
        pooling: "mean" or "last".

    Returns:
        [n, D], in the order of the n lists that have a token.
    """
    require(pooling in ("mean", "last"), f"pooling is {pooling!r}; it must be mean or last")
    require(batch_size >= 1, f"batch_size is {batch_size}; it must be at least 1")
    token_lists = [ids for ids in token_lists if len(ids)]
    require(bool(token_lists), "no texts to take features of")
    require_ids(model, token_lists)
    require_causal(model, token_lists[0][0], model.device)
    out = np.empty((len(token_lists), model.config.hidden_size), np.float32)
    for rows, ids_BL, real_BL in right_padded(token_lists, batch_size, model.device):
        out[rows] = _pool(last_hidden(model, ids_BL).float(), real_BL, pooling).cpu().numpy()
    return out


def reduce_features(features_ND: Floats) -> Floats:
    """Rows scaled to unit length, then the fewest principal components that explain 90 % of their variance."""
    norm_N1 = np.linalg.norm(features_ND, axis=1, keepdims=True)
    x_ND = features_ND / np.where(norm_N1 > 0, norm_N1, 1)
    x_ND = x_ND - x_ND.mean(0)
    variance_D, axes_DD = np.linalg.eigh(x_ND.T @ x_ND)
    share_D = np.cumsum(variance_D[::-1])
    keep = int(np.searchsorted(share_D, EXPLAINED_VARIANCE * share_D[-1])) + 1
    return np.asarray(x_ND @ axes_DD[:, ::-1][:, :keep])


def divergence_curve(p_J: Floats, q_J: Floats, *, scale: float = 5.0, points: int = 25) -> Floats:
    """The divergence curve of two histograms, from (1, 0) to (0, 1).

    Between these, for mixtures r = w p + (1 - w) q: x = exp(-scale KL(q || r)), y = exp(-scale KL(p || r)).

    Returns:
        [points + 2, 2].
    """
    w_W1 = np.linspace(1e-6, 1 - 1e-6, points)[:, None]
    mixed_WJ = w_W1 * p_J + (1 - w_W1) * q_J
    xy_W2 = np.exp(-scale * np.stack([_kl(q_J, mixed_WJ), _kl(p_J, mixed_WJ)], axis=1))
    return np.concatenate([[[1.0, 0.0]], xy_W2, [[0.0, 1.0]]])


def area(curve_W2: Floats) -> float:
    """Area between the curve and the axes, by trapezoids.

    Trapezoids over x and over y give the same area when the curve ends on both axes: summed by parts, each is
    the area of the polygon of the curve and the origin. So nothing is sorted, and ties cannot matter.
    """
    x, y = curve_W2.T
    return float((x[:-1] * y[1:] - x[1:] * y[:-1]).sum() / 2)


def _kl(p_J: Floats, r_WJ: Floats) -> Floats:
    """KL(p || r) [W]; r covers p, and rounding must not push it below 0."""
    seen_J = p_J > 0
    kl_W = (p_J[seen_J] * np.log(p_J[seen_J] / r_WJ[:, seen_J])).sum(-1)
    return np.asarray(np.maximum(kl_W, 0))


def _clusters(x_ND: Floats, buckets: int, seed: int) -> Ints:
    """k-means labels [N]. One OpenMP thread: several add up in any order, and one seed must give one score."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    kmeans = KMeans(buckets, n_init=KMEANS_RUNS, max_iter=KMEANS_STEPS, random_state=seed)
    with threadpool_limits(1, user_api="openmp"):
        return np.asarray(kmeans.fit_predict(x_ND), np.int64)


def _score(labels_N: Ints, p_rows: Ints, q_rows: Ints, buckets: int, scale: float) -> float:
    """MAUVE of some rows of P and of Q (counted from 0 in each), the clusters given."""
    n_p = len(p_rows)
    p_J = np.bincount(labels_N[p_rows], minlength=buckets) / n_p
    q_J = np.bincount(labels_N[n_p + q_rows], minlength=buckets) / len(q_rows)
    return area(divergence_curve(p_J, q_J, scale=scale))


def _error(labels: Sequence[Ints], n_p: int, n_q: int, buckets: int, scale: float) -> float:
    """Standard error of the mean over seeds from sampling texts: a bootstrap over texts with the clusters kept."""
    rng = np.random.default_rng(0)
    draws = [(rng.integers(n_p, size=n_p), rng.integers(n_q, size=n_q)) for _ in range(RESAMPLES)]
    means = [np.mean([_score(labels_N, *rows, buckets, scale) for labels_N in labels]) for rows in draws]
    return float(np.std(means, ddof=1))


def _pool(hidden_BLD: Tensor, real_BL: Tensor, pooling: Pooling) -> Tensor:
    length_B = real_BL.sum(-1)
    if pooling == "last":
        return hidden_BLD[length_B.new_tensor(range(len(length_B))), length_B - 1]
    return (hidden_BLD * real_BL[..., None]).sum(1) / length_B[:, None]
