"""The engine, turn by turn in this thread: rows come out as if alone, take turns, and fail alone."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from adjust_dlm.decoders import decode
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.fast.rounds import Held
from adjust_dlm.decoders.machinery.rows import join
from adjust_dlm.serve import lane
from adjust_dlm.serve.engine import Engine, Limits
from adjust_dlm.serve.errors import ApiError
from adjust_dlm.serve.work import Finished, Progress, RowSpec, Work
from adjust_dlm.types import DecodeConfig, DecodeResult, InputError
from helpers import oracle, tiny_sampler
from serving import Log, Typist, mixed, play, submit, told, typing_engine, wait_for, work_of
from test_fast import Replayed
from tiny_ar import BOS, MASK, chat_base, tiny_partner

SETTINGS: list[dict[str, Any]] = [
    {"decoder": "adjust", "tokens_per_step": 4},
    {"decoder": "adjust", "tokens_per_step": 2, "temperature": 0.7, "top_p": 0.9},
    {"decoder": "adaptive", "options": {"gamma": 3.0}},
    {"decoder": "threshold", "options": {"tau": 0.1}, "block_length": 3},
    {"decoder": "edlm", "tokens_per_step": 3},
    {"decoder": "adjust", "tokens_per_step": 2, "block_length": 4, "cache_period": 3},
]


def typed(text: str = "hello world foo", **limits: Any) -> tuple[Typist, Engine, list[int]]:
    """Base, engine, and a prompt."""
    base = Typist(text)
    return base, typing_engine(base, **limits), base.encode("write:")


@pytest.fixture(autouse=True)
def _replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "Graphs", Replayed)


WORKS = [
    work_of(ids, ids[::-1] if n % 3 else ids, new=1 + n % 11, seed=n * 2**60, **SETTINGS[n % len(SETTINGS)])
    for n in range(30)
    for ids in [[BOS, *range(10, 11 + n % 7)]]
]


@functools.cache
def alone_once(n: int, b: int) -> DecodeResult:
    """A row of one of these by itself."""
    base, work = chat_base(context=128), WORKS[n]
    spec = work.rows[b]
    return decode(
        base, [spec.ids], work.config.but(seed=spec.seed, max_new_tokens=spec.new), decoder=work.decoder,
        rows=[spec.row], sampler=tiny_sampler(base), partner=tiny_partner(base), **work.options,
    )  # fmt: skip


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rows_come_out_as_if_alone_whoever_comes_and_goes(*, rows: int, eager: bool) -> None:
    """30 requests of six kinds, a new one every other turn: texts, ids, orders and costs are those of `decode`."""
    base = chat_base(context=128)
    helpers = {"sampler": tiny_sampler(base), "partner": tiny_partner(base)}
    engine = Engine(base, **helpers, limits=Limits(rows=rows), eager=eager)
    asked: list[tuple[Work, Log]] = []
    for work in WORKS:
        asked.append((work, submit(engine, work)[1]))
        play(engine, 2)
    play(engine)
    assert (engine.held.captures > 0) is not eager
    for n, (work, log) in enumerate(asked):
        for b, spec in enumerate(work.rows):
            alone = alone_once(n, b)
            end = log.finished[b]
            assert end.ids == alone.tokens_BL[0].tolist()
            assert end.text == base.decode(end.ids[len(spec.ids) :])
            commits = [c for e in log.events if isinstance(e, Progress) and e.index == b for c in e.commits]
            order = alone.order_BL[0].tolist()
            assert [(c.position, c.order) for c in commits] == sorted(
                ((i, n) for i, n in enumerate(order) if n >= 0), key=lambda pair: pair[1]
            )
            assert all(end.ids[c.position] == c.token for c in commits)
            cost = [alone.rounds_B, alone.base_calls_B, alone.sampler_calls_B, alone.partner_calls_B]
            assert list(end.cost) == [int(calls_B[0]) for calls_B in cost]


def test_rows_of_one_kind_share_passes() -> None:
    base, engine, ids = typed()
    logs = [submit(engine, work_of(ids, new=4 + n, seed=n))[1] for n in range(5)]
    play(engine)
    assert base.passes == engine.done.base_calls == engine.done.rounds == 8
    assert [log.finished[0].text for log in logs] == ["hell", "hello", "hello ", "hello w", "hello wo"]


@pytest.mark.parametrize("stops", [(), ("lo",)])
def test_quiet_rows_end_alike_and_say_nothing_before(stops: tuple[str, ...]) -> None:
    """In one lane with others; a stop string ends them as soon as it is there."""
    _, engine, ids = typed()
    settings: dict[str, Any] = {"new": 8, "stops": stops, "order": "left_to_right"}
    _, loud = submit(engine, work_of(ids, ids, **settings))
    _, quiet = submit(engine, work_of(ids, ids, quiet=True, **settings))
    play(engine)
    assert loud.rounds and not quiet.rounds
    for b in (0, 1):
        one, other = (replace(log.finished[b], seconds=0, queued=0) for log in (loud, quiet))
        assert one == other and one.text == ("hel" if stops else "hello wo")
        assert one.cost.rounds == (5 if stops else 8)


def test_rows_that_come_together_join_the_canvas_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    monkeypatch.setattr(lane, "join", lambda parts: joined.append(len(parts)) or join(parts))
    _, engine, ids = typed()
    logs = [submit(engine, work_of(ids, new=4 + n, seed=n))[1] for n in range(3)]
    engine.turn()
    logs += [submit(engine, work_of([*ids, 9], new=6, seed=n))[1] for n in range(3)]
    play(engine)
    assert joined == [3, 4] and all(log.finished for log in logs)


def test_rows_that_cannot_come_in_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine, ids = typed()
    (_, first), (_, other) = (submit(engine, work_of(ids, new=4, temperature=t)) for t in (1.0, 0.5))
    engine.turn()
    lost = [submit(engine, work_of(ids, new=4, seed=n))[1] for n in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(lane, "join", lambda parts: (_ for _ in ()).throw(MemoryError("full")))
        engine.turn()
    _, late = submit(engine, work_of(ids, new=4, seed=5))
    play(engine)
    assert [log.finished[0].text for log in (first, other, late)] == ["hell"] * 3
    assert all(isinstance(log.error, MemoryError) for log in lost)


def test_lanes_take_turns_and_none_starves() -> None:
    """A long request, then one of another kind in every turn: the long one still gets every other round."""
    _, engine, ids = typed("x" * 100)
    _, long = submit(engine, work_of(ids, new=20))
    seen = []
    for n in range(38):
        submit(engine, work_of(ids, new=1, temperature=0.5 + n / 100))
        engine.turn()
        seen.append(long.rounds)
    assert seen[-1] >= 7 and all(b - a <= 1 for a, b in pairwise(seen))
    waits = [seen.index(k + 1) - seen.index(k) for k in range(seen[0], seen[-1])]
    assert max(waits) <= engine.limits.rows
    play(engine)
    assert long.finished[0].text == "x" * 20


def test_two_lanes_alternate() -> None:
    _, engine, ids = typed()
    _, first = submit(engine, work_of(ids, new=6))
    _, second = submit(engine, work_of(ids, new=6, temperature=0.0))
    counts = []
    for _ in range(6):
        engine.turn()
        counts.append((first.rounds, second.rounds))
    assert counts == [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3)]


def test_bounds_on_rows_and_tokens_hold_and_the_oldest_goes_first() -> None:
    _, engine, ids = typed(rows=3, tokens=40)
    works = [work_of(ids, new=n) for n in (8, 8, 30, 2)]  # canvases of 15, 15, 37 and 9 tokens
    logs = [submit(engine, work)[1] for work in works]
    engine.turn()
    assert (engine.running, engine.waiting) == (2, 2)  # 3 rows of 37 columns are too many, and nobody overtakes
    play(engine)
    ends = [next(n for n, e in enumerate(log.events) if isinstance(e, Finished)) for log in logs]
    assert [logs[n].finished[0].text for n in range(4)] == ["hello wo", "hello wo", "hello world foo", "he"]
    assert ends == [8, 8, 30, 2]


def test_every_canvas_that_a_pass_looks_at_counts() -> None:
    """Canvases of 9 tokens, at most 75 of a pass: drafts of `verified` and completions of `edlm` are canvases, too."""
    base = chat_base(context=64)
    helpers = {"sampler": tiny_sampler(base), "partner": tiny_partner(base)}
    for decoder, options, rows in (
        ("joint", {}, 8), ("verified", {"depth": 1}, 8), ("verified", {"depth": 2}, 4), ("verified", {}, 2),
        ("verified", {"depth": 9}, 1), ("edlm", {}, 4), ("edlm", {"completions": 4}, 2),
    ):  # fmt: skip
        engine, ids = Engine(base, **helpers, limits=Limits(tokens=75)), [BOS, 10, 11]
        logs = [submit(engine, work_of(ids, new=6, seed=n, decoder=decoder, options=options))[1] for n in range(9)]
        engine.turn()
        assert (engine.running + sum(len(log.finished) for log in logs), engine.waiting) == (rows, 9 - rows)
        play(engine)
        assert all(log.finished for log in logs)


def test_the_queue_is_bounded_and_a_request_comes_in_whole_or_not_at_all() -> None:
    _, engine, ids = typed(queue=3)
    submit(engine, work_of(ids, ids))
    with pytest.raises(ApiError, match="2 rows wait already and the queue takes 3") as refused:
        submit(engine, work_of(ids, ids))
    assert (refused.value.status_code, refused.value.headers, engine.waiting) == (429, {"retry-after": "1"}, 2)
    submit(engine, work_of(ids))
    with pytest.raises(InputError, match="4 rows in one request"):
        submit(engine, work_of(ids, ids, ids, ids))
    play(engine)
    assert engine.idle


def test_a_cancelled_request_leaves_before_the_next_round() -> None:
    base, engine, ids = typed()
    ticket, log = submit(engine, work_of(ids, ids, new=15))
    _, other = submit(engine, work_of(ids, new=15))
    engine.turn()
    assert engine.running == 3
    ticket.over = True
    seen = len(log.events)
    engine.turn()
    assert engine.running == 1 and len(log.events) == seen
    play(engine)
    assert base.passes == 15 and other.finished[0].text == "hello world foo"


def test_a_cancelled_request_leaves_the_queue() -> None:
    base, engine, ids = typed(rows=1)
    submit(engine, work_of(ids, new=2))
    ticket, log = submit(engine, work_of(ids, new=2))
    ticket.over = True
    play(engine)
    assert log.events == [] and base.passes == 2


def test_a_request_that_takes_too_long_is_given_up_waiting_or_not() -> None:
    base, engine, ids = typed("x" * 100, rows=1, seconds=0.05)
    base.sleep = 0.02
    logs = [submit(engine, work_of(ids, new=50))[1] for _ in range(2)]
    play(engine)
    for log in logs:
        assert isinstance(log.error, ApiError) and log.error.status_code == 504
    assert logs[0].rounds >= 1 >= logs[1].rounds  # one, if it was handed in a pass later
    assert base.passes < 50


@pytest.mark.parametrize(("bad", "kind"), [("~", FloatingPointError), ("`", ZeroDivisionError)])
def test_a_poisoned_request_fails_alone(bad: str, kind: type[Exception]) -> None:
    """NaN, and a crash of the whole pass: neighbours of every request have the texts that they have without it."""
    base, engine, ids = typed()
    before = submit(engine, work_of(ids, ids, new=12))[1]
    engine.turn()
    poisoned = submit(engine, work_of(base.encode(f"{bad}:"), new=12))[1]
    after = submit(engine, work_of(ids, new=12))[1]
    play(engine)
    assert isinstance(poisoned.error, kind)
    for log in (before, after):
        assert all(end.text == "hello world " and end.cost.base_calls == 12 for end in log.finished.values())
    assert len(before.finished) == 2 and engine.idle


@pytest.mark.parametrize("eager", [True, False])
def test_a_row_that_gives_nan_fails_alone_in_the_fast_form_too(*, eager: bool) -> None:
    """The others go on from the canvas before the round: they get what they get without it, at the same cost."""
    base = chat_base(context=128)
    with torch.no_grad():
        base.model.embed_tokens.weight[101] = torch.nan  # beyond the tokenizer: never drawn
    works = [work_of([BOS, 10 + n], [BOS, 20 + n], new=9, decoder="adjust", tokens_per_step=2) for n in range(2)]
    want = told(Engine(base, sampler=tiny_sampler(base), eager=True), works)
    engine = Engine(base, sampler=tiny_sampler(base), eager=eager)
    first = submit(engine, works[0])[1]
    engine.turn()
    poisoned = submit(engine, work_of([BOS, 101, 10], new=9, decoder="adjust", tokens_per_step=2))[1]
    assert told(engine, works[1:])[0] == want[1]
    assert isinstance(poisoned.error, FloatingPointError)
    assert [(end.ids, end.cost) for end in first.finished.values()] == want[0][0]
    assert engine.held.shapes == (0 if eager else 4)  # 1, 2, 4 and 8 slots


def test_the_fast_form_of_a_server_is_refused_or_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    fast.log_fallback.cache_clear()
    caplog.set_level("WARNING", "adjust_dlm")  # others may have asked for more
    base = chat_base(context=128)
    for eager in (None, True):  # on the CPU it is not asked for
        engine = Engine(base, sampler=tiny_sampler(base), eager=eager)
        told(engine, [work_of([BOS], decoder="joint")])
        assert engine.held == Held()
    assert not caplog.records
    told(Engine(base, sampler=oracle(base), eager=False), [work_of([BOS], decoder=d) for d in ("joint", "adjust")])
    told(Engine(base, eager=False), [work_of([BOS], decoder="threshold", options={"tau": 0.5})] * 2)
    told(Engine(Typist("hello"), eager=False), [work_of([BOS])])
    assert [record.getMessage() for record in caplog.records] == [
        "eager decoding: the sampler is a function; only passes are captured",
        "eager decoding: decoder threshold has no fast form; only passes are captured",
        "eager decoding: base tiny is no transformer",
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_server_on_buffers_answers_as_the_reference(temperature: float) -> None:
    """What tests/test_gpu.py compares on a card."""
    reference, captured = (told(*mixed("cpu", temperature=temperature, eager=eager)) for eager in (True, False))
    assert reference == captured and all(rows and commits for rows, commits in reference)


def test_a_failing_row_takes_its_own_request_along_and_no_other() -> None:
    base, engine, ids = typed()
    mixed = submit(engine, work_of(ids, base.encode("~:"), new=4))[1]
    play(engine)
    assert isinstance(mixed.error, FloatingPointError) and engine.idle


def test_a_request_that_cannot_be_let_in_fails_alone() -> None:
    """The engine checks what it is given once more: an id that is not there, a canvas that is too long."""
    _, engine, ids = typed()
    logs = [submit(engine, work_of(row, new=new))[1] for row, new in ((ids, 3), ([10**6], 3), (ids, 500), (ids, 3))]
    play(engine)
    assert [log.finished[0].text for log in (logs[0], logs[3])] == ["hel", "hel"]
    assert isinstance(logs[1].error, InputError) and isinstance(logs[2].error, InputError)


def test_text_that_cannot_be_decoded_fails_alone() -> None:
    base, engine, ids = typed()

    def decode(words: list[int]) -> str:
        if len(words) == 3:
            raise LookupError("no such word")
        return base.decode(words)

    engine.words.decode = decode  # type: ignore[method-assign]
    other = submit(engine, work_of(ids, new=2))[1]
    failing = submit(engine, work_of(ids, new=3))[1]
    play(engine)
    assert other.finished[0].text == "he" and isinstance(failing.error, LookupError)


def test_a_stop_string_ends_a_row_early() -> None:
    """In blocks of one the text grows from the left; 'lo wo' is complete after eight tokens."""
    base, engine, ids = typed()
    log = submit(engine, work_of(ids, new=15, block_length=1, stops=("lo wo",)))[1]
    play(engine)
    end = log.finished[0]
    assert (end.text, end.reason, end.tokens, base.passes) == ("hel", "stop", 3, 8)
    assert end.ids.count(MASK) == 7


def test_what_is_not_served_is_refused() -> None:
    _, engine, ids = typed()
    assert {"klass", "origin", "sdar", "edlm"}.isdisjoint(engine.decoders)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"decoder": "klass"}, "'klass' is not served here; served are joint, parallel, adjust"),
        ({"decoder": "edlm"}, "'edlm' needs an autoregressive partner"), ({"decoder": "none"}, "'none' is not served"),
        ({"schedule": "reference"}, "leave schedule at exact"),
        ({"options": {"tau": 1}}, "no option tau"),
    ]  # fmt: skip
    for settings, message in cases:
        with pytest.raises(InputError, match=message):
            submit(engine, work_of(ids, **settings))
    with pytest.raises(InputError, match="rows is 0; it must be at least 1"):
        Limits(rows=0)


def test_the_thread_drains_and_closes() -> None:
    base, engine, ids = typed("x" * 100)
    base.sleep = 0.005
    engine.start()
    _, log = submit(engine, work_of(ids, new=20))
    engine.draining = True
    with pytest.raises(ApiError, match="shutting down") as refused:
        submit(engine, work_of(ids))
    assert refused.value.status_code == 503
    wait_for(lambda: engine.idle)
    assert log.finished[0].text == "x" * 20
    engine.close()
    assert not any(thread.name == "adjust-engine" for thread in threading.enumerate())


def test_closing_gives_up_what_is_left() -> None:
    base, engine, ids = typed("x" * 100, rows=1)
    base.sleep = 0.01
    engine.start()
    logs = [submit(engine, work_of(ids, new=90))[1] for _ in range(2)]
    wait_for(lambda: logs[0].rounds > 0)
    engine.close()
    assert all(isinstance(log.error, ApiError) and log.error.status_code == 503 for log in logs)
    assert base.passes < 90
    with pytest.raises(ApiError):
        engine.call(lambda: 1)


def test_a_fault_of_the_engine_fails_what_is_there_and_not_what_comes() -> None:
    _, engine, ids = typed()
    fair, engine._admit = engine._admit, lambda: 1 / 0  # type: ignore[assignment,method-assign]
    broken = submit(engine, work_of(ids, new=3))[1]
    engine.start()
    wait_for(lambda: broken.events)
    assert isinstance(broken.error, ZeroDivisionError)
    engine._admit = fair  # type: ignore[method-assign]
    good = submit(engine, work_of(ids, new=3))[1]
    wait_for(lambda: good.finished)
    engine.close()
    assert good.finished[0].text == "hel"


def test_calls_run_between_rounds_and_fail_alone() -> None:
    _, engine, ids = typed()
    log = submit(engine, work_of(ids, new=3))[1]
    answer, failing = engine.call(lambda: threading.current_thread().name), engine.call(lambda: 1 // 0)
    engine.start()
    assert answer.result(5) == "adjust-engine"
    assert isinstance(failing.exception(5), ZeroDivisionError)
    wait_for(lambda: log.finished)
    engine.close()


def test_chances_are_reported_to_who_asks() -> None:
    _, engine, ids = typed()
    spec = RowSpec(ids=ids, new=3, seed=0, row=0)
    works = [
        Work(rows=(spec,), decoder="joint", config=DecodeConfig(temperature=0), chance=chance)
        for chance in (True, False)
    ]
    logs = [submit(engine, work)[1] for work in works]
    play(engine)
    told = [[c.chance for e in log.events if isinstance(e, Progress) for c in e.commits] for log in logs]
    assert told[0] == pytest.approx([1.0, 1.0, 1.0], abs=1e-5) and told[1] == [None, None, None]
