"""KL between the law of a decoder and the base's, read off its commits: equal to enumeration on the exact base."""

import itertools
import json
import math
import re
from dataclasses import asdict, replace

import pytest
import torch

from adjust_dlm.bases.exact import ExactBase
from adjust_dlm.decoders import DECODERS, Decoder, decode
from adjust_dlm.decoders.divergence import MEASURES, Observation, measures, observe, why_not
from adjust_dlm.decoders.divergence import _Observed as Observed
from adjust_dlm.decoders.machinery import proposals
from adjust_dlm.decoders.machinery.canvas import Picks
from adjust_dlm.decoders.threshold import ThresholdOptions
from adjust_dlm.eval import divergence
from adjust_dlm.eval.divergence import DivergenceConfig, compare_with_parallel, run
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.types import DecodeConfig, InputError
from helpers import (
    Law,
    conditionals,
    count_passes,
    empirical,
    exact_base,
    follow,
    oracle,
    parallel_law,
    target,
    temper,
    tiny_base,
    tiny_sampler,
    writer,
)

WORDS, LENGTH = 3, 4
N = 3000  # so many rows that each of the 81 strings comes up


def smooth_base() -> ExactBase:
    """No string is rare, and the tokens depend on each other."""
    generator = torch.Generator().manual_seed(3)
    return ExactBase(torch.rand((WORDS,) * LENGTH, generator=generator).pow(4) + 0.05)


def kl(p: Law, q: Law) -> float:
    return sum(mass * math.log(mass / q[s]) for s, mass in p.items() if mass)


def seen(decoder: str, tokens_per_step: int = 1, *, source: str = "own", n: int = N, temperature: float = 1.0, **more):
    """An observation, and the text of each row."""
    base, options = smooth_base(), more.pop("options", {})
    texts = []
    config = DecodeConfig(**{"tokens_per_step": tokens_per_step, "max_new_tokens": LENGTH, "order": "entropy", **more})
    real_commit = Observed.commit

    def commit(canvas, picks):
        real_commit(canvas, picks)
        texts[:] = canvas.tokens_BL.tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Observed, "commit", commit)
        sampler = oracle(base) if DECODERS[decoder].needs_sampler else None
        found = observe(
            base, [[]] * n, config, decoder=decoder, source=source, temperature=temperature, sampler=sampler, **options
        )
    return found, [tuple(text) for text in texts]


def expected(found: Observation, texts: list[tuple[int, ...]], law: Law, measure: str) -> float:
    """E over the law of the sum over a text's commits: exact, since equal texts have equal commits."""
    sums = dict(zip(texts, found.value_BTM[..., MEASURES.index(measure)].double().sum(-1).tolist(), strict=True))
    assert sums.keys() == {s for s, mass in law.items() if mass > 0}
    return sum(law[s] * value for s, value in sums.items())


@pytest.mark.parametrize("tokens_per_step", [2, 3, 4])
def test_parallel_has_the_enumerated_divergence_both_ways(tokens_per_step: int) -> None:
    p = target(smooth_base())
    q = parallel_law(p, "entropy", tokens_per_step)
    own, texts = seen("parallel", tokens_per_step)
    assert expected(own, texts, q, "kl_qp") == pytest.approx(kl(q, p), rel=1e-5)
    base, texts = seen("parallel", tokens_per_step, source="base")
    assert expected(base, texts, p, "kl_pq") == pytest.approx(kl(p, q), rel=1e-5)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 4])
def test_own_tokens_follow_the_decoders_law_and_those_of_the_base_follow_the_bases(tokens_per_step: int) -> None:
    p = target(smooth_base())
    q = parallel_law(p, "entropy", tokens_per_step)
    for source, law in (("own", q), ("base", p)):
        _, texts = seen("parallel", tokens_per_step, source=source)
        frequencies = empirical(torch.tensor(texts))
        assert sum(abs(frequencies.get(s, 0) - mass) for s, mass in law.items()) / 2 < 0.08


def test_another_temperature_of_the_decoder_or_of_the_law() -> None:
    p = target(smooth_base())
    cold = parallel_law(p, "entropy", 2, temperature=0.7)
    base = smooth_base()
    config = DecodeConfig(tokens_per_step=2, max_new_tokens=LENGTH, order="entropy", temperature=0.7)
    own = observe(base, [[]] * 20_000, config, decoder="parallel", temperature=1.0)
    mean, half = (own.summary()[name] * LENGTH for name in ("kl_qp", "kl_qp_ci95"))
    assert abs(mean - kl(cold, p)) < 2 * half < 0.05 * mean
    joint_at_07 = parallel_law(p, "entropy", 1, temperature=0.7)
    same = observe(base, [[]] * 500, config.but(tokens_per_step=1), decoder="joint", temperature=0.7)
    assert float(same.value_BTM[..., :2].abs().max()) < 1e-6  # joint at T against the law at T
    apart = observe(base, [[]] * 20_000, config.but(tokens_per_step=1), decoder="joint", temperature=1.0)
    assert apart.summary()["kl_qp"] * LENGTH == pytest.approx(kl(joint_at_07, p), rel=0.05)


@pytest.mark.parametrize(
    ("decoder", "settings", "options"),
    [
        ("joint", {}, {}),
        ("adjust", {"tokens_per_step": 3}, {}),
        ("adjust", {"tokens_per_step": 4, "candidates": 2}, {}),
        ("adaptive", {}, {"gamma": 1.5}),
        ("adjust", {"tokens_per_step": 2, "order": "random"}, {}),
    ],
)
@pytest.mark.parametrize("source", ["own", "base"])
def test_joint_and_every_decoder_with_the_oracle_have_none(decoder, settings, options, source) -> None:
    found, _ = seen(decoder, source=source, n=300, options=options, **settings)
    assert float(found.value_BTM[..., :2].abs().max()) < 1e-6
    assert bool((found.depth_BT >= 0).all())


@pytest.mark.parametrize("decoder", ["parallel", "adjust"])
def test_places_are_counted_from_the_base_pass_on(decoder: str) -> None:
    """ADJUST commits one by one and parallel decoding all at once: the round is what counts."""
    found, _ = seen(decoder, 3, n=2)
    assert found.depth_BT.tolist() == [[0, 1, 2, 0]] * 2


def law_of_rule(chosen) -> Law:
    """Of a decoder that commits, of the product of marginals, the positions that `chosen` names."""
    p = target(smooth_base())

    def commits(state, open_):
        p_LV = temper(conditionals(p, state), 1.0, 1.0)
        positions = chosen(p_LV, open_)
        outcomes = [(1.0, {})]
        for i in positions:
            outcomes = [(m * p_LV[i, t], made | {i: t}) for m, made in outcomes for t in range(WORDS)]
        yield from outcomes

    return follow((None,) * LENGTH, commits)


def by_threshold(p_LV, open_):
    ranked = sorted(open_, key=lambda i: (-p_LV[i].max(), i))
    return [i for n, i in enumerate(ranked) if n == 0 or p_LV[i].max() >= 0.4]


def by_entropy(p_LV, open_):
    entropy = {i: -sum(x * math.log(x) for x in p_LV[i] if x > 0) for i in open_}
    ranked, spent, out = sorted(open_, key=lambda i: (entropy[i], i)), 0.0, []
    for i in ranked:
        if spent > 1.2:
            break
        out.append(i)
        spent += entropy[i]
    return out


@pytest.mark.parametrize(
    ("decoder", "options", "rule"),
    [
        ("threshold", {"tau": 0.4, "score": "likeliest"}, by_threshold),
        ("entropy_bound", {"gamma": 1.2}, by_entropy),
    ],
)
def test_rules_that_look_at_the_canvas_have_the_enumerated_divergence(decoder, options, rule) -> None:
    p, q = target(smooth_base()), law_of_rule(rule)
    assert kl(q, p) > 0.02
    own, texts = seen(decoder, options=options)
    assert expected(own, texts, q, "kl_qp") == pytest.approx(kl(q, p), rel=1e-5)
    base, texts = seen(decoder, source="base", options=options)
    assert expected(base, texts, p, "kl_pq") == pytest.approx(kl(p, q), rel=1e-5)


def test_the_kl_of_a_random_order_is_that_of_order_and_text_together() -> None:
    """By following every order: each is as likely as the next, and a round is two positions of it. Texts alone, whose
    law is the mean over orders, are closer to the base's."""
    p, kl_of_orders, texts = target(smooth_base()), [], dict.fromkeys(target(smooth_base()), 0.0)
    orders = list(itertools.permutations(range(LENGTH)))
    for order in orders:
        front: dict = {(None,) * LENGTH: 1.0}
        for pair in (order[:2], order[2:]):
            following: dict = {}
            for state, mass in front.items():
                p_LV = conditionals(p, state)
                for tokens in itertools.product(range(WORDS), repeat=2):
                    after = list(state)
                    after[pair[0]], after[pair[1]] = tokens
                    chance = p_LV[pair[0], tokens[0]] * p_LV[pair[1], tokens[1]]
                    following[tuple(after)] = following.get(tuple(after), 0.0) + mass * chance
            front = following
        kl_of_orders.append((kl(front, p), kl(p, front)))
        texts = {s: mass + front[s] / len(orders) for s, mass in texts.items()}
    for n, (source, name) in enumerate((("own", "kl_qp"), ("base", "kl_pq"))):
        summary = observe(
            smooth_base(), [[]] * 20_000, DecodeConfig(tokens_per_step=2, max_new_tokens=LENGTH, order="random"),
            decoder="parallel", source=source,
        ).summary()  # fmt: skip
        mean, half = (summary[key] * LENGTH for key in (name, f"{name}_ci95"))
        whole = sum(both[n] for both in kl_of_orders) / len(orders)
        assert abs(mean - whole) < 2 * half < 0.1 * whole
        assert mean - 2 * half > (kl(texts, p), kl(p, texts))[n]


@pytest.mark.parametrize("tokens_per_step", [2, 3, 4])
def test_what_a_round_writes_behind_the_end_of_a_text_does_not_count(tokens_per_step: int) -> None:
    """ADJUST stops there, and parallel decoding writes its round to the end: both are held to texts up to their end."""
    end, joint = 1, smooth_base().joint
    base = ExactBase(joint, end_ids=(end,))

    def cut(law: Law) -> Law:
        out: Law = {}
        for s, mass in law.items():
            text = s[: s.index(end) + 1] if end in s else s
            out[text] = out.get(text, 0.0) + mass
        return out

    p, whole = cut(target(base)), parallel_law(target(base), "left_to_right", tokens_per_step)
    q = cut(whole)
    config = DecodeConfig(tokens_per_step=tokens_per_step, max_new_tokens=LENGTH, order="left_to_right")
    for source, name, mine, other in (("own", "kl_qp", q, p), ("base", "kl_pq", p, q)):
        texts: list[tuple[int, ...]] = []
        real_commit = Observed.commit

        def commit(canvas, picks, texts=texts, real_commit=real_commit):
            real_commit(canvas, picks)
            texts[:] = [tuple(row) for row in canvas.tokens_BL.tolist()]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Observed, "commit", commit)
            found = observe(base, [[]] * N, config, decoder="parallel", source=source)
        texts = [text[: text.index(end) + 1] if end in text else text for text in texts]
        assert (found.depth_BT >= 0).sum(-1).tolist() == [len(text) for text in texts]
        assert expected(found, texts, mine, name) == pytest.approx(kl(mine, other), rel=1e-5)


def test_an_end_token_of_an_earlier_round_ends_a_text_too() -> None:
    """Places 1 (the end) and 2 go first; then place 0 completes the text: place 3, of the same round, is behind it."""
    base = writer([3, 1, 4, 5], [7.0, 9.0, 8.0, 6.0], end_ids=(1,))
    config = DecodeConfig(tokens_per_step=2, max_new_tokens=4, temperature=0.0)
    assert observe(base, [[]], config, decoder="parallel").depth_BT.tolist() == [[0, 1, 0, -1]]


def test_of_all_that_a_rule_proposes_only_what_it_commits_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a batch's every position are gigabytes at a real vocabulary; in chunks they come out the same."""
    how = {"decoder": "threshold", "tau": 0.4, "score": "likeliest"}
    config = DecodeConfig(max_new_tokens=LENGTH)
    whole = observe(smooth_base(), [[]] * 50, config, **how)
    kept, real = [], Observed._what_was_proposed

    def noted(canvas, wanted_BL):
        number_BL, q_RV = real(canvas, wanted_BL)
        kept.append(len(q_RV) == int(wanted_BL.sum()) == int((number_BL >= 0).sum()))
        return number_BL, q_RV

    monkeypatch.setattr(Observed, "_what_was_proposed", noted)
    monkeypatch.setattr(proposals, "rows_at_once", lambda _: 7)
    chunks = observe(smooth_base(), [[]] * 50, config, **how)
    assert all(kept) and torch.equal(whole.depth_BT, chunks.depth_BT)
    assert torch.allclose(whole.value_BTM, chunks.value_BTM, atol=1e-6)


def test_entropies_and_nll_of_joint_text_are_those_of_the_law() -> None:
    p = target(smooth_base())
    found, texts = seen("joint")
    entropy = -sum(mass * math.log(mass) for mass in p.values())
    for measure in ("entropy_q", "entropy_p", "nll_p"):
        assert expected(found, texts, p, measure) == pytest.approx(entropy, rel=1e-5)
    text_nll = found.value_BTM[..., MEASURES.index("nll_p")].sum(-1)
    assert text_nll.tolist() == pytest.approx([-math.log(p[s]) for s in texts], rel=1e-4)


def test_measures_by_hand() -> None:
    q, p = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]])
    found = dict(zip(MEASURES, measures(q.log(), p.log(), torch.tensor([0]))[0].tolist(), strict=True))
    assert found["kl_qp"] == pytest.approx(0.5 * math.log(2))
    assert found["kl_pq"] == math.inf
    assert found["entropy_q"] == pytest.approx(math.log(2))
    assert found["entropy_p"] == pytest.approx(1.5 * math.log(2))
    assert found["nll_p"] == pytest.approx(math.log(4))


def test_greedy_decoding_draws_from_a_point() -> None:
    base = smooth_base()
    config = DecodeConfig(tokens_per_step=2, max_new_tokens=LENGTH, order="entropy", temperature=0.0)
    value_TM = observe(base, [[]], config, decoder="parallel", temperature=1.0).value_BTM[0]
    facts = dict(zip(MEASURES, value_TM.unbind(-1), strict=True))
    assert torch.equal(facts["entropy_q"], torch.zeros(LENGTH))
    assert facts["kl_qp"].tolist() == pytest.approx(facts["nll_p"].tolist())  # KL(point || p) = -log p(point)


def test_summaries_are_ratios_over_texts_of_any_length() -> None:
    value_BTM = torch.zeros(3, 3, len(MEASURES))
    value_BTM[:, :, 0] = torch.tensor([[1.0, 2.0, 3.0], [2.0, 0.0, 0.0], [4.0, 4.0, 0.0]])
    depth_BT = torch.tensor([[0, 1, 0], [0, -1, -1], [0, 1, -1]])
    summary = Observation(value_BTM, depth_BT, torch.tensor([2, 1, 1])).summary()
    assert (summary["texts"], summary["tokens"], summary["tokens_per_pass"]) == (3, 6, 1.5)
    assert summary["kl_qp"] == pytest.approx(16 / 6)
    residual = [6 - 3 * 16 / 6, 2 - 16 / 6, 8 - 2 * 16 / 6]
    half = 1.96 * math.sqrt(sum(r * r for r in residual) / 2 / 3) / 2
    assert summary["kl_qp_ci95"] == pytest.approx(half)
    assert [place["kl_qp"] for place in summary["by_commit"]] == pytest.approx([(1 + 3 + 2 + 4) / 4, (2 + 4) / 2])
    first = Observation(value_BTM[:1], depth_BT[:1], torch.tensor([2]))
    second = Observation(value_BTM[1:, :2], depth_BT[1:, :2], torch.tensor([1, 1]))
    whole = Observation.cat([first, second])
    assert torch.equal(whole.depth_BT, depth_BT) and torch.equal(whole.value_BTM, value_BTM)


def test_a_batch_is_its_rows_one_by_one_on_a_padded_transformer() -> None:
    """Unequal prompts, ends allowed: what is measured of a row depends on that row alone."""
    base = tiny_base("dream")
    g, prompts = tiny_sampler(base), [[2, 5, 6], [2, 7, 8, 9, 10], [2]]
    config = DecodeConfig(tokens_per_step=3, max_new_tokens=7, seed=3)
    for decoder in ("parallel", "adjust"):
        how = {"decoder": decoder, "sampler": g if decoder == "adjust" else None}
        for source in ("own", "base"):
            together = observe(base, prompts, config, source=source, rows=[4, 5, 6], **how)
            alone = [
                observe(base, [prompt], config, source=source, rows=[row], **how)
                for row, prompt in zip((4, 5, 6), prompts, strict=True)
            ]
            apart = Observation.cat(alone)
            assert torch.equal(together.depth_BT, apart.depth_BT)
            assert torch.allclose(together.value_BTM, apart.value_BTM, atol=1e-4)
    assert float(together.value_BTM[..., 0].max()) > 0.1


def test_own_tokens_are_those_of_decode() -> None:
    base = smooth_base()
    config = DecodeConfig(tokens_per_step=2, max_new_tokens=LENGTH, order="entropy", seed=7)
    _, texts = seen("parallel", 2, n=200, seed=7)
    assert texts == [tuple(row) for row in decode(base, [[]] * 200, config, decoder="parallel").tokens_BL.tolist()]


@pytest.mark.parametrize(
    ("decoder", "settings", "options", "sources", "said"),
    [
        ("threshold", {}, ThresholdOptions(), ("own",), "threshold:score=likeliest does not"),
        ("factor", {}, None, ("own",), "chooses positions by the tokens drawn there"),
        ("klass", {}, None, ("own",), "chooses positions by the tokens drawn there"),
        ("guided", {}, None, ("own",), "chooses positions by the tokens drawn there"),
        ("fast_dllm", {}, None, ("own",), "chooses positions by the tokens drawn there"),
        ("sdar", {}, None, ("own",), "chooses positions by the tokens drawn there"),
        ("verified", {}, None, ("own",), "measure joint"),
        ("edlm", {}, None, ("own",), "second model"),
        ("parallel", {"order": "confidence"}, None, ("own",), "order confidence looks at the drawn tokens"),
        ("parallel", {"top_p": 0.9}, None, ("own", "base"), "KL.p .. q. is infinite; sources own gives"),
        ("parallel", {"top_k": 5}, None, ("base",), "'top_k': 5"),
        ("parallel", {"temperature": 0.0}, None, ("base",), "'temperature': 0.0"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(decoder, settings, options, sources, said) -> None:
    reason = why_not(exact_base(), decoder, DecodeConfig(**settings), options, sources)
    assert reason is not None and re.search(said, reason)


def test_what_can_be_measured() -> None:
    base = exact_base()
    likeliest = ThresholdOptions(score="likeliest")
    for decoder, settings, options, sources in (
        ("threshold", {}, likeliest, ("own", "base")),
        ("threshold", {"temperature": 0.0}, ThresholdOptions(), ("own",)),
        ("parallel", {"top_p": 0.9}, None, ("own",)),
        ("parallel", {"order": "confidence", "temperature": 0.0}, None, ("own",)),
        ("threshold", {"order": "confidence"}, likeliest, ("own", "base")),  # these three have an order of their own
        ("entropy_bound", {"order": "confidence"}, None, ("own", "base")),
        ("origin", {"order": "confidence"}, None, ("own", "base")),
    ):
        assert why_not(base, decoder, DecodeConfig(**settings), options, sources) is None
    with pytest.raises(InputError, match="temperature of the law is 0"):
        observe(base, [[]], DecodeConfig(max_new_tokens=4), decoder="joint", temperature=0.0)


def test_a_decoder_that_keeps_its_distributions_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(base, canvas) -> None:
        while canvas.open:
            canvas.start_round()
            first_B1 = canvas.masked_BL.long().argmax(-1, keepdim=True)
            canvas.commit(Picks(first_B1, torch.zeros_like(first_B1), torch.ones_like(first_B1).bool()))

    monkeypatch.setitem(DECODERS, "silent", Decoder(silent))
    with pytest.raises(InputError, match="'silent' cannot be measured: it does not tell the canvas"):
        observe(exact_base(), [[]], DecodeConfig(max_new_tokens=4), decoder="silent")


# the command ---------------------------------------------------------------------------------------------------


def test_the_command_puts_decoders_side_by_side(tmp_path) -> None:
    base = tiny_base("dream")
    config = DivergenceConfig(
        base="dream", output=str(tmp_path), decoders=("joint", "parallel", "adjust", "adaptive:gamma=2"), n=6,
        tokens_per_step=(2, 3), max_new_tokens=6, batch_size=4, temperatures=(1.0, 0.5), device="cpu",
    )  # fmt: skip
    out = run(config, base, tiny_sampler(base))
    names = ["joint"]
    names += [f"{d}:tokens_per_step={k}" for d in ("parallel", "adjust") for k in (2, 3)] + ["adaptive:gamma=2"]
    assert [(row["temperature"], row["decoder"]) for row in out["rows"]] == [(t, d) for t in (1.0, 0.5) for d in names]
    assert out["first_row"] == EVALUATION_ROWS
    rows = {(row["temperature"], row["decoder"]): row for row in out["rows"]}
    assert rows[1.0, "joint"]["kl_qp"] < 1e-5 > rows[0.5, "joint"]["kl_pq"]
    line = rows[0.5, "adjust:tokens_per_step=3"]
    assert line["tokens_per_pass"] == 3 == line["tokens_per_step"]
    settings = DecodeConfig(tokens_per_step=3, max_new_tokens=6, temperature=0.5, suppress_eos=True, seed=1)
    numbers = [EVALUATION_ROWS + n for n in range(6)]
    how = {"decoder": "adjust", "sampler": tiny_sampler(base), "temperature": 0.5, "rows": numbers}
    for source, name in (("own", "kl_qp"), ("base", "kl_pq")):
        whole = observe(base, [[2]] * 6, settings, source=source, **how).summary()
        assert line[name] == line[source][name] == pytest.approx(whole[name], rel=1e-4)
    parallel = rows[0.5, "parallel:tokens_per_step=3"]
    assert line["kl_qp_below_parallel"] == pytest.approx(1 - line["kl_qp"] / parallel["kl_qp"])
    assert "kl_qp_below_parallel" not in parallel and "kl_qp_below_parallel" not in rows[1.0, "adaptive:gamma=2"]
    json.dumps(asdict(config))


def test_a_variant_may_have_another_temperature_than_the_law(tmp_path) -> None:
    base = tiny_base("llada")
    config = DivergenceConfig(
        base="llada", output=str(tmp_path), decoders=("parallel:tokens_per_step=2,temperature=0.7",), n=4,
        max_new_tokens=4, order="entropy", sources=("own",), device="cpu",
    )  # fmt: skip
    (row,) = run(config, base)["rows"]
    settings = DecodeConfig(
        tokens_per_step=2, max_new_tokens=4, temperature=0.7, suppress_eos=True, seed=1, order="entropy"
    )
    numbers = [EVALUATION_ROWS + n for n in range(4)]
    direct = observe(base, [[2]] * 4, settings, decoder="parallel", temperature=1.0, rows=numbers).summary()
    assert row["kl_qp"] == pytest.approx(direct["kl_qp"]) and "kl_pq" not in row


def test_shares_below_parallel_by_hand() -> None:
    line = {"temperature": 1.0, "tokens_per_step": 2, "kl_qp": 0.4, "kl_qp_ci95": 0.04}
    lines = [line | {"decoder": "parallel"}, line | {"decoder": "adjust", "kl_qp": 0.1, "kl_qp_ci95": 0.005}]
    compare_with_parallel(lines)
    assert lines[1]["kl_qp_below_parallel"] == pytest.approx(0.75)
    assert lines[1]["kl_qp_below_parallel_ci95"] == pytest.approx(0.25 * math.hypot(0.1, 0.05))


def test_rounding_is_not_compared_with_rounding() -> None:
    """At K = 1 parallel is joint; and a rule without a K is no rival of parallel at K = 1."""
    line = {"temperature": 1.0, "tokens_per_step": 1, "kl_qp": 1e-9, "kl_qp_ci95": 1e-9}
    others = ("joint", "adjust:tokens_per_step=1", "adaptive:gamma=2", "parallel:tokens_per_step=1,temperature=0.8")
    lines = [line | {"decoder": decoder} for decoder in ("parallel:tokens_per_step=1", *others)]
    compare_with_parallel(lines)
    assert not any("kl_qp_below_parallel" in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n": 1}, "n is 1"),
        ({"temperatures": (0.0,)}, "temperatures is 0.0; it must be a finite number above 0"),
        ({"decoders": ("paralel",)}, "unknown decoder 'paralel'"),
        ({"sources": ()}, "sources is empty"),
        ({"sources": ("mine",)}, "sources is 'mine'"),
        ({"tokens_per_step": (0,)}, "tokens_per_step is"),
        ({"tokens_per_step": (), "decoders": ("parallel", "adjust")}, "or tokens_per_step is empty"),
        ({"decoders": ("adjust:max_new_tokens=64",)}, "has a max_new_tokens of its own"),
        ({"decoders": ("adjust:suppress_eos=false",)}, "has a suppress_eos of its own"),
    ],
)
def test_bad_settings_are_named(settings, said) -> None:
    with pytest.raises(InputError, match=said):
        DivergenceConfig(**settings)


def test_the_command_refuses_before_anything_is_decoded(tmp_path) -> None:
    config = DivergenceConfig(
        base="exact", output=str(tmp_path / "out"), decoders=("joint", "threshold:tau=0.5"), max_new_tokens=4, n=2
    )
    with pytest.raises(InputError, match=r"'threshold:tau=0.5' cannot be measured: at temperature 1.0"):
        run(config, exact_base())
    base = exact_base()
    passes = count_passes(base)
    with pytest.raises(InputError, match=r"candidates is 2; .* 'parallel' does not"):
        run(replace(config, decoders=("joint", "parallel:candidates=2")), base)
    assert passes.calls == 0
    assert not (tmp_path / "out").exists()


def test_a_run_that_was_stopped_measures_only_what_is_left(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, g = tiny_base("dream"), tiny_sampler(tiny_base("dream"))
    config = DivergenceConfig(
        base="dream", output=str(tmp_path), decoders=("parallel", "adjust"), n=2, tokens_per_step=(2,),
        max_new_tokens=4, device="cpu",
    )  # fmt: skip
    calls = []

    def counted(*args, **more):
        calls.append((more["decoder"], more["source"]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return observe(*args, **more)

    monkeypatch.setattr(divergence, "observe", counted)
    with pytest.raises(KeyboardInterrupt):
        run(config, base, g)
    first = run(config, base, g)["rows"]
    assert calls == [("parallel", "own"), ("parallel", "base"), *2 * [("adjust", "own")], ("adjust", "base")]
    assert run(config, base, g)["rows"] == first and len(calls) == 5
    other = tiny_sampler(base, seed=1)
    assert run(config, base, other)["rows"][1]["kl_qp"] != first[1]["kl_qp"]  # another g is measured anew
    assert calls[5:] == [("adjust", "own"), ("adjust", "base")]
