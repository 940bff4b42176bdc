"""A base that writes a given text, and servers on free ports: what tests of `serve` share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from adjust_dlm.bases import Base, BaseSpec
from adjust_dlm.serve.asks import AppConfig
from adjust_dlm.serve.engine import Engine, Limits
from adjust_dlm.serve.http import Server, bound, create_app
from adjust_dlm.serve.work import Event, Finished, Progress, RowSpec, Ticket, Work
from adjust_dlm.types import DecodeConfig, State
from helpers import oracle, wide
from tiny_ar import BOS, CHAT, IM_END, MASK, SPECIAL

MODEL = "tiny"


def byte_tokenizer(*merged: bytes) -> Any:
    """One token for every byte, and one for each pair of bytes that is named."""
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {code: letter for letter in letters for code in [_code(letter)]}
    pairs = [(names[pair[0]], names[pair[1]]) for pair in merged]
    vocab = {word: n for n, word in enumerate([*SPECIAL, *letters, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT
    return fast


def _code(letter: str) -> int:
    """The byte that a byte-level letter stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [n for n in range(256) if n not in plain]
    return ord(letter) if ord(letter) in plain else others[ord(letter) - 256]


class Typist(Base):
    """Writes `text` and end tokens behind the last colon of a row, the position farthest to the right first.

    Attributes:
        passes: so far.
        sleep: seconds of each.
        poison: a row with this token gives NaN; one with `crash` raises.
    """

    def __init__(self, text: str, tokenizer: Any = None, *, context: int = 256) -> None:
        self.tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
        self.ids, size = self.tokenizer.encode(text, add_special_tokens=False), len(self.tokenizer)
        self.spec = BaseSpec(
            name=MODEL, mask_id=MASK, end_ids=(IM_END,), pad_id=IM_END, bos_id=BOS, vocab_size=size, token_limit=size,
            context=context, order="entropy", order_on="raw",
        )  # fmt: skip
        self.width, self.fingerprint, self.head_matrix = size, "typist", torch.eye(size)
        self.colon, self.poison, self.crash = (self.tokenizer.encode(c, add_special_tokens=False)[0] for c in ":~`")
        self.passes, self.sleep = 0, 0.0

    def hidden(self, state: State) -> Tensor:
        self.passes += 1
        time.sleep(self.sleep)
        self.check_length(state)
        rows, length = state.tokens_BL.shape
        if bool((state.tokens_BL == self.crash).any()):
            raise ZeroDivisionError("crash")
        at_B = torch.where(state.tokens_BL == self.colon, torch.arange(length), -1).amax(-1)
        index_BL = torch.arange(length) - at_B[:, None] - 1
        line = torch.tensor([*self.ids, *[IM_END] * length])
        target_BL = line[index_BL.clamp(0, len(line) - 1)]
        h_BLD = torch.zeros(rows, length, self.width)
        h_BLD.scatter_(2, target_BL[..., None], (30.0 + index_BL * 0.01)[..., None])
        h_BLD[(state.tokens_BL == self.poison).any(-1)] = torch.nan
        return h_BLD

    def embed(self, tokens_BL: Tensor) -> Tensor:
        return self.head_matrix[tokens_BL]


def typing_engine(base: Base, **limits: Any) -> Engine:
    """An engine whose g is the base itself."""
    return Engine(base, sampler=oracle(base), limits=Limits(**limits))


def work_of(
    *rows: list[int], decoder: str = "joint", new: int = 8, seed: int = 3, stops: tuple[str, ...] = (),
    options: dict[str, Any] | None = None, quiet: bool = False, **settings: Any,
) -> Work:  # fmt: skip
    """A request for rows 0, 1, ... of a seed."""
    specs = tuple(RowSpec(ids=ids, new=new, seed=seed, row=n) for n, ids in enumerate(rows))
    config = DecodeConfig(**settings)
    return Work(rows=specs, decoder=decoder, config=config, options=options or {}, stops=stops, quiet=quiet)


class Log:
    """A sink."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def rounds(self) -> int:
        return sum(isinstance(event, Progress) for event in self.events)

    @property
    def finished(self) -> dict[int, Finished]:
        return {event.index: event for event in self.events if isinstance(event, Finished)}

    @property
    def error(self) -> BaseException:
        (failed,) = [event for event in self.events if isinstance(event, BaseException)]
        assert self.events[-1] is failed
        return failed


def submit(engine: Engine, work: Work) -> tuple[Ticket, Log]:
    log = Log()
    return engine.submit(work, log), log


def play(engine: Engine, turns: int = 10_000) -> int:
    """Turns until the engine is idle, in this thread."""
    for n in range(turns):
        if engine.idle:
            return n
        engine.turn()
    return turns


def told(engine: Engine, works: list[Work], turns: int = 2) -> list[list[Any]]:
    """Plays requests that come in every other turn; for each the ids and costs of its rows, and their commits."""
    logs = []
    for work in works:
        logs.append(submit(engine, work)[1])
        play(engine, turns)
    play(engine)
    return [
        [
            [(end.ids, end.cost) for _, end in sorted(log.finished.items())],
            [(e.index, c.position, c.token, c.order) for e in log.events if isinstance(e, Progress) for c in e.commits],
        ]
        for log in logs
    ]  # fmt: skip


def mixed(device: str, *, temperature: float, eager: bool) -> tuple[Engine, list[Work]]:
    """An engine on that device and a dozen requests of five kinds, whose rows differ in length, number and seed."""
    base, g = wide(device)
    base.tokenizer = byte_tokenizer()
    engine = Engine(base, sampler=g, limits=Limits(rows=5), eager=eager)
    kinds: list[dict[str, Any]] = [
        {"decoder": "adjust", "tokens_per_step": 4}, {"decoder": "parallel", "tokens_per_step": 3, "top_p": 0.9},
        {"decoder": "joint", "block_length": 4}, {"decoder": "adjust", "tokens_per_step": 3, "candidates": 4},
        {"decoder": "threshold", "options": {"tau": 0.5}},
    ]  # fmt: skip
    works = [
        work_of([47, *range(1, 3 + n)], [47, 5 + n], new=6 + n, seed=n, temperature=temperature, **kinds[n % 5])
        for n in range(12)
    ]
    return engine, [replace(work, chance=n % 2 == 0) for n, work in enumerate(works)]


class Served(NamedTuple):
    url: str
    client: httpx.Client
    server: Server
    engine: Engine


@contextmanager
def serving(engine: Engine, **config: Any) -> Iterator[Served]:
    """A server in a thread; it must end by itself when told to."""
    app = create_app(engine, AppConfig(model=MODEL, **config))
    server, sock = Server(app, engine, drain_seconds=10), bound("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        wait_for(lambda: server.started)
        with httpx.Client(base_url=url, timeout=30) as client:
            yield Served(url, client, server, engine)
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    """Until the condition holds; fails if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
