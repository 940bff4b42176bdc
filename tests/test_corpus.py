"""The corpus: AR samples follow the enumerated law; every kind of canvas has the structure training relies on."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases.autoregressive import autoregressive_base, read_vocabulary
from adjust_dlm.data import canvases as canvases_module
from adjust_dlm.data import corpus as corpus_module
from adjust_dlm.data.ar import ar_sample, chat_context, endless
from adjust_dlm.data.canvases import KINDS, CorpusConfig, Source, chat_canvas
from adjust_dlm.data.corpus import Corpus, _texts, build_corpus, load_corpus
from adjust_dlm.types import InputError
from tiny_ar import BOS, IM_END, IM_START, MASK, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def next_law(model: Any, prefix: list[int], *, temperature: float, top_p: float, forbid: list[int]) -> Tensor:
    """The filtered next-token distribution, with a sort and without a cache."""
    logits_V = model(input_ids=torch.tensor([prefix])).logits[0, -1].double()
    logits_V[forbid] = -torch.inf
    p_V = (logits_V / temperature).softmax(-1)
    order = p_V.argsort(descending=True)
    before = p_V[order].cumsum(0) - p_V[order]
    kept = torch.zeros_like(p_V)
    kept[order[before < top_p]] = p_V[order[before < top_p]]
    return kept / kept.sum()


def chi_square_is_plausible(counts_V: Tensor, law_V: Tensor) -> bool:
    """Pearson's statistic over cells of expectation >= 5 (the rest pooled) within 5 standard deviations."""
    expected_V = law_V * counts_V.sum()
    assert counts_V[law_V == 0].sum() == 0
    big = expected_V >= 5
    observed = torch.cat([counts_V[big], counts_V[~big].sum()[None]])
    expected = torch.cat([expected_V[big], expected_V[~big].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    return bool(statistic < freedom + 5 * (2 * freedom) ** 0.5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_samples_follow_the_enumerated_law(family: str) -> None:
    model = tiny_model(family)
    base, settings = autoregressive_base(model, TOKENIZER), {"temperature": 1.3, "top_p": 0.9}
    how: dict[str, Any] = {"rows": range(20_000), "new_tokens": 2, "batch_size": 7_000, "seed": 1, **settings}
    tokens = torch.tensor(ar_sample(endless(base), [[BOS, 9]] * 20_000, **how))
    settings["forbid"] = [MASK, *range(100, 104)]
    first = next_law(model, [BOS, 9], **settings)
    assert (first > 0).sum() > 10
    assert chi_square_is_plausible(tokens[:, 0].bincount(minlength=104).double(), first)
    likeliest = int(first.argmax())
    second = next_law(model, [BOS, 9, likeliest], **settings)
    seen = tokens[tokens[:, 0] == likeliest, 1].bincount(minlength=104).double()
    assert chi_square_is_plausible(seen, second)


def test_vocabulary_is_read_from_tokenizer_and_config() -> None:
    words = read_vocabulary(TOKENIZER, tiny_model().config)
    assert (words.bos_id, words.end_ids, words.mask_id) == (BOS, (IM_END, BOS), MASK)
    assert (words.token_limit, words.size, words.chat) == (100, 104, True)
    assert read_vocabulary(TOKENIZER, tiny_model().config, mask_id=102).mask_id == 102
    with pytest.raises(InputError, match="mask id 2 starts or ends texts"):
        read_vocabulary(TOKENIZER, tiny_model().config, mask_id=IM_END)
    with pytest.raises(InputError, match=r"mask id 104 is not in the model's 0\.\.103"):
        read_vocabulary(TOKENIZER, tiny_model().config, mask_id=104)


def test_chat_canvases() -> None:
    def canvas(sample: list[int]) -> tuple[list[int], int] | None:
        return chat_canvas(sample, [1, 50], [2, 60, 1, 61], (2, 0), 14)

    turn = [2, 60, 1, 61]
    assert canvas([7, 8, *turn, 9, 10, 2, 11, 12, 13]) == ([1, 50, 7, 8, *turn, 9, 10, 2, 2, 2, 2], 8)
    assert canvas([7, *turn, 9, 10, 0, 11, 12, 13, 14]) == ([1, 50, 7, *turn, 9, 10, 0, 2, 2, 2, 2], 7)
    assert canvas([7, *turn, 9, 8, 9, 8, 9, 8, 9]) == ([1, 50, 7, *turn, 9, 8, 9, 8, 9, 8, 9], 7)
    assert canvas([7, 2, 5, *turn, 9, 8, 9, 8, 9]) is None  # another end token first
    assert canvas([*turn, 9, 8, 9, 8, 9, 8, 9, 8]) is None  # no user turn
    assert canvas([7, *turn, 2, 8, 9, 8, 9, 8, 9]) is None  # no reply
    assert canvas([7, 7, 7, 7, 7, 7, 7, 7, *turn]) is None  # no room for a reply
    assert chat_canvas([7] * 65 + [*turn, 9], [1, 50], turn, (2, 0), 80) is None  # a user turn of 65 tokens


def source() -> Source:
    model = tiny_model()
    return Source(autoregressive_base(model, TOKENIZER), TOKENIZER, read_vocabulary(TOKENIZER, model.config))


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adjust_dlm.data.settings.SHARD_ROWS", 8)


def config(**changes: Any) -> CorpusConfig:
    fields: dict[str, Any] = {"ar": "tiny", "text": 20, "chat": 0, "lists": 0, "heldout": 6, "sample_batch": 16}
    return CorpusConfig(**{**fields, "length": 17, **changes})


def everything(folder: Path, split: str = "train") -> list[list[int]]:
    corpus = load_corpus(folder, split)
    lines: list[list[int]] = torch.cat([corpus.tokens_NL, corpus.prompt_len_N[:, None]], 1).tolist()
    return lines


def test_text_canvases_hold_no_mask(tmp_path: Path) -> None:
    build_corpus(tmp_path, config(), source())
    train, held = load_corpus(tmp_path, "train"), load_corpus(tmp_path, "heldout")
    assert (train.tokens_NL.shape, train.tokens_NL.dtype) == ((20, 17), torch.int32)
    assert held.tokens_NL.shape == (6, 17)
    assert train.tokens_NL[:, 0].eq(BOS).all()
    assert train.tokens_NL.ne(MASK).all()
    assert train.tokens_NL[:, 1:].max() < 100
    assert train.prompt_len_N.eq(1).all()
    assert len({tuple(row) for row in everything(tmp_path) + everything(tmp_path, "heldout")}) == 26


def test_ranks_share_the_work_and_a_finished_shard_stays(tmp_path: Path) -> None:
    build_corpus(tmp_path / "one", config(), source())
    for rank in (1, 0):
        build_corpus(tmp_path / "two", config(sample_batch=5), source(), rank=rank, world=2)
    assert everything(tmp_path / "one") == everything(tmp_path / "two")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "one").glob("*.parquet")}
    (tmp_path / "one" / "train-text-00001.parquet").unlink()
    with pytest.raises(InputError, match="1 shards are missing"):
        load_corpus(tmp_path / "one", "train")
    build_corpus(tmp_path / "one", config(), source())
    new = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "one").glob("*.parquet")}
    assert {name for name in new if new[name] != times[name]} == {"train-text-00001.parquet"}
    assert everything(tmp_path / "one") == everything(tmp_path / "two")


def test_a_folder_belongs_to_its_settings(tmp_path: Path) -> None:
    build_corpus(tmp_path, config(), source())
    with pytest.raises(InputError, match="a corpus with seed = 0, not 1"):
        build_corpus(tmp_path, config(seed=1), source())


def test_list_canvases(tmp_path: Path) -> None:
    build_corpus(tmp_path, config(text=0, lists=20, length=330), source())
    corpus = load_corpus(tmp_path, "train")
    assert len(corpus.tokens_NL) == 20
    for tokens, prompt in zip(corpus.tokens_NL.tolist(), corpus.prompt_len_N.tolist(), strict=True):
        assert tokens[0] == IM_START
        assert TOKENIZER.decode(tokens[:prompt]).startswith("<|im_start|>user\n")
        assert TOKENIZER.decode(tokens[:prompt]).endswith("<|im_end|>\n<|im_start|>assistant\n")
        end = tokens.index(IM_END, prompt)
        assert isinstance(json.loads(TOKENIZER.decode(tokens[prompt:end])), list)
        assert set(tokens[end:]) == {IM_END}
    with pytest.raises(InputError, match="no list task fits a canvas of 50 tokens"):
        build_corpus(tmp_path / "short", config(text=0, lists=20, length=50), source())


def test_chat_canvases_are_filtered_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [ord("a") - 29] * 3  # "a" is token 68
    turn = TOKENIZER.encode("<|im_end|>\n<|im_start|>assistant\n")
    good, bad = [*written, *turn, 70, 71, IM_END], [*written, 70, 71]
    asked: list[tuple[int, ...]] = []

    def fake(base: Any, prompts: list[list[int]], *, rows: range, new_tokens: int, **options: Any) -> list[list[int]]:
        asked.append(base.spec.end_ids)
        assert prompts == [TOKENIZER.encode("<|im_start|>user\n")] * len(rows)
        samples = [bad if row % 4 else good for row in rows]
        return [sample + [90] * (new_tokens - len(sample)) for sample in samples]

    monkeypatch.setattr(canvases_module, "ar_sample", fake)
    build_corpus(tmp_path, config(text=0, chat=9, length=40, sample_batch=8), source())
    corpus = load_corpus(tmp_path, "train")
    start = "<|im_start|>user\naaa<|im_end|>\n<|im_start|>assistant\n"
    for tokens, prompt in zip(corpus.tokens_NL.tolist(), corpus.prompt_len_N.tolist(), strict=True):
        assert TOKENIZER.decode(tokens[:prompt]) == start
        assert tokens[prompt:] == [70, 71] + [IM_END] * (38 - prompt)
    assert len(corpus.tokens_NL) == 9
    assert set(asked) == {()}
    monkeypatch.setattr(canvases_module, "MIN_YIELD", 0.5)
    with pytest.raises(InputError, match="only 2 of 8 samples"):
        build_corpus(tmp_path / "other", config(text=0, chat=9, length=40, sample_batch=8), source())


def test_chats_are_sampled_behind_the_models_own_system_turn() -> None:
    from adjust_dlm.data.ar import CHAT_TEMPLATE

    tokenizer = tiny_tokenizer()
    assert chat_context(tokenizer) == ""
    tokenizer.chat_template = "{{ '<|im_start|>system\\nhi<|im_end|>\\n' }}" + CHAT_TEMPLATE
    assert chat_context(tokenizer) == "<|im_start|>system\nhi<|im_end|>\n"


def test_the_users_own_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 40)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "y" * 20}) + "\n\n" + json.dumps({"text": "short"}) + "\n")
    files = (tmp_path / "a.txt", tmp_path / "b.jsonl")
    build_corpus(tmp_path / "c", config(text=0, text_files=files), source())
    texts = [
        TOKENIZER.decode(line[:-1]) for split in ("heldout", "train") for line in everything(tmp_path / "c", split)
    ]
    ys = "<|endoftext|>" + "y" * 16
    # 40 = 16 + 16 + 8 and 20 = 16 + 4: pieces under 16 tokens are dropped; the first of 50 is held out.
    assert texts == ["<|endoftext|>" + "x" * 16] * 2 + [ys]
    assert load_corpus(tmp_path / "c", "train").kind_N.tolist() == [KINDS.index("files")] * 2
    (tmp_path / "a.txt").write_text("x" * 41)
    with pytest.raises(InputError, match="a corpus with files = "):
        build_corpus(tmp_path / "c", config(text=0, text_files=files), source())
    (tmp_path / "d.jsonl").write_text('{"txt": 1}\n')
    with pytest.raises(InputError, match=r"d\.jsonl, line 1: not an object with a field 'text' or 'messages'"):
        build_corpus(tmp_path / "d", config(text=0, text_files=(tmp_path / "d.jsonl",)), source())


@pytest.mark.parametrize(("heldout", "found"), [(0, []), (2, [0, 101]), (1000, [0, 50, 100, 150, 200])])
def test_how_many_of_the_files_are_held_out(heldout: int, found: list[int], tmp_path: Path) -> None:
    """Of 201 texts."""
    texts = [f"{n:016}" for n in range(201)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_corpus(tmp_path / "c", config(text=0, text_files=(tmp_path / "a.jsonl",), heldout=heldout), source())
    held = everything(tmp_path / "c", "heldout") if heldout else []
    assert [int(TOKENIZER.decode(line[1:17])) for line in held] == found
    assert len(everything(tmp_path / "c", "train")) == 201 - len(found)


def test_chats_of_the_users_own(tmp_path: Path) -> None:
    """All before the last reply is given; what does not fit is left out; a control token in a content is letters."""
    said = [("user", "a"), ("assistant", "b"), ("user", "c<|im_end|>"), ("assistant", "de")]
    chat = [{"role": role, "content": content} for role, content in said]
    long = [*chat[:1], {"role": "assistant", "content": "x" * 200}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (chat, long)))
    own = config(text=0, text_files=(path,), length=96, heldout=0)
    build_corpus(tmp_path / "c", own, source())
    (line,) = everything(tmp_path / "c")
    *tokens, given = line
    begin = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>"
    assert TOKENIZER.decode(tokens[:given]) == begin + "<|im_end|>\n<|im_start|>assistant\n"
    assert tokens[:given].count(IM_END) == 3  # those of the template
    assert tokens[given : given + 2] == TOKENIZER.encode("de") and set(tokens[given + 2 :]) == {IM_END}
    for n, wrong in enumerate((chat[:1], chat[:3], [{"role": "user"}, chat[1]], [chat[0], "x"])):
        path.write_text(json.dumps({"messages": wrong}) + "\n")
        with pytest.raises(InputError, match=r"a\.jsonl, line 1: messages must be objects with a role"):
            build_corpus(tmp_path / f"d{n}", own, source())
    path.write_text(json.dumps({"messages": long}) + "\n")
    with pytest.raises(InputError, match="and no chat that fits"):
        build_corpus(tmp_path / "e", own, source())


def test_a_text_shorter_than_a_canvas_is_filled_with_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("z" * 20)
    build_corpus(tmp_path / "c", config(text=0, text_files=(tmp_path / "a.txt",), length=31, heldout=0), source())
    z = TOKENIZER.encode("z")[0]
    assert everything(tmp_path / "c") == [[BOS, *[z] * 20, *[IM_END] * 10, 1]]


def test_of_kind() -> None:
    corpus = Corpus(torch.arange(6).view(3, 2), torch.ones(3), torch.tensor([0, 2, 0]))
    assert corpus.of_kind("text").tokens_NL.tolist() == [[0, 1], [4, 5]]
    assert corpus.of_kind("chat").tokens_NL.shape == (0, 2)


def test_lines_and_texts_of_a_jsonl_file(tmp_path: Path) -> None:
    """A line separator of Unicode ends no line, a byte order mark is no text, and what is no text is refused."""
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "one\u2028two\x85"}\r\n\n{"text": "x"}\n'.encode())
    assert list(_texts(path)) == ["one\u2028two\x85", "x"]
    (tmp_path / "a.txt").write_bytes("\ufeffone".encode())
    assert list(_texts(tmp_path / "a.txt")) == ["one"]
    for wrong in ("null", "3", '["a"]', '"\\ud800"'):
        path.write_text('{"text": "x"}\n{"text": ' + wrong + "}\n")
        with pytest.raises(InputError, match=r"a\.jsonl, line 2(: not an object with a field| holds half a char)"):
            list(_texts(path))


def test_a_mask_token_in_a_text_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("z" * 8 + "<empty_output>" + "z" * 8)
    build_corpus(tmp_path / "c", config(text=0, text_files=(tmp_path / "a.txt",), heldout=0), source())
    assert everything(tmp_path / "c") == [[BOS, *TOKENIZER.encode("z" * 16), 1]]


def test_a_damaged_corpus_says_what_to_delete(tmp_path: Path) -> None:
    build_corpus(tmp_path, config(), source())
    shard = tmp_path / "train-text-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"cannot read .*train-text-00001\.parquet: .*; delete it"):
        load_corpus(tmp_path, "train")
    (tmp_path / "manifest.json").write_text('{"settings"')
    for call in (lambda: load_corpus(tmp_path, "train"), lambda: build_corpus(tmp_path, config(), source())):
        with pytest.raises(InputError, match=r"manifest\.json is not JSON"):
            call()


def test_a_shard_that_cannot_be_written_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    build_corpus(tmp_path, config(), source())
    (tmp_path / "train-text-00001.parquet").unlink()
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(corpus_module, "_claim", lambda *_: None)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*train-text-00001\.parquet: No space left"):
        build_corpus(tmp_path, config(), source())
    assert sorted(tmp_path.iterdir()) == before
