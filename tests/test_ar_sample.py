"""An autoregressive model as a base with blocks of one token: joint decoding samples the model itself."""

import functools
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from adjust_dlm import load_base
from adjust_dlm.bases.autoregressive import autoregressive_base, is_autoregressive, read_vocabulary
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.data.ar import ar_sample, endless
from adjust_dlm.data.canvases import Source
from adjust_dlm.decoders import decode, decode_many
from adjust_dlm.decoders.fast import engine
from adjust_dlm.sampling import draw, process, uniform
from adjust_dlm.train.config import TrainConfig
from adjust_dlm.train.trainer import _check_blocks
from adjust_dlm.types import DecodeConfig, InputError
from tiny_ar import IM_END, MASK, save_tiny, tiny_model, tiny_tokenizer

# Of lengths 3 to 141.
PROMPTS = [[4 + (7 * n + 3 * i) % 96 for i in range(length)] for n, length in enumerate((9, 3, 70, 12, 9, 40, 141, 72))]
ROWS = [5, 900, 17, 2**41, 3, 4, 0, 8]
HOW: dict[str, Any] = {"new_tokens": 70, "seed": 3, "temperature": 1.2, "top_p": 1.0}
FAMILIES = ["llama", "qwen2", "qwen3"]
NEVER = [MASK, *range(100, 104)]  # MASK, and rows of the head that are no token


def base_of(family: str = "llama", **options: Any) -> TransformerBase:
    return autoregressive_base(tiny_model(family, **options), tiny_tokenizer())


def up_to(row: list[int], ends: tuple[int, ...]) -> list[int]:
    """A row up to and with its first end."""
    return row[: next((n for n, token in enumerate(row, 1) if token in ends), None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_same_alone_and_beside_any_others(family: str) -> None:
    base = base_of(family)
    alone = [
        ar_sample(endless(base), [prompt], rows=[row], batch_size=1, **HOW)[0]
        for prompt, row in zip(PROMPTS, ROWS, strict=True)
    ]
    assert [len(row) for row in alone] == [70] * 8 and len(set(map(tuple, alone))) == 8
    wanted = [up_to(row, base.spec.end_ids) for row in alone]
    assert len({len(row) for row in wanted}) > 2  # some rows end before the others
    for batch_size in (2, 3, 8) if family == "llama" else (3,):
        assert ar_sample(endless(base), PROMPTS, rows=ROWS, batch_size=batch_size, **HOW) == alone
        assert ar_sample(base, PROMPTS, rows=ROWS, batch_size=batch_size, **HOW) == wanted
        back = ar_sample(base, PROMPTS[::-1], rows=ROWS[::-1], batch_size=batch_size, **HOW)
        assert back == wanted[::-1]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_is_drawn_from_the_model_itself(family: str, tied: bool) -> None:
    """As in a loop of transformers without a cache, with the uniform of the row, the commit and the position."""
    model, settings = tiny_model(family, tied=tied), DecodeConfig(temperature=1.2, top_p=0.9)
    base, how = autoregressive_base(model, tiny_tokenizer()), {**HOW, "new_tokens": 5, "top_p": 0.9}
    for prompt, row, made in zip(PROMPTS, ROWS, ar_sample(base, PROMPTS, rows=ROWS, batch_size=8, **how), strict=True):
        assert len(made) == 5 or made[-1] in base.spec.end_ids
        for number, token in enumerate(made):
            ids = prompt + made[:number]
            logits_1V = (
                model(input_ids=torch.tensor([ids])).logits[:, -1].index_fill(1, torch.tensor(NEVER), -torch.inf)
            )
            u_1 = uniform(3, *torch.tensor([[row], [number], [len(ids)]]))
            assert token == int(draw(process(logits_1V, settings), u_1, settings.temperature))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_rows_of_a_folder_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    base, model = load_base(str(save_tiny(tmp_path, family))), tiny_model(family)
    assert is_autoregressive(tmp_path) and (base.spec.block, base.spec.order) == (1, "left_to_right")
    got = ar_sample(base, PROMPTS, rows=ROWS, batch_size=8, **{**HOW, "temperature": 0})
    for prompt, row in zip(PROMPTS, got, strict=True):
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=70, do_sample=False, suppress_tokens=NEVER,
            eos_token_id=list(base.spec.end_ids),
        )  # fmt: skip
        assert row == made[0, len(prompt) :].tolist()
        assert row[-1] in base.spec.end_ids or len(row) == 70


def test_every_decoder_commits_a_token_a_pass_and_a_pass_reads_what_is_new() -> None:
    base, config = base_of(), DecodeConfig(tokens_per_step=4, max_new_tokens=12, temperature=0.0)
    joint = decode(base, PROMPTS[:2], config.but(tokens_per_step=1), decoder="joint")
    parallel = decode(base, PROMPTS[:2], config, decoder="parallel")
    assert parallel.tokens_BL.equal(joint.tokens_BL) and parallel.base_calls_B.equal(joint.base_calls_B)
    widths: list[int] = []
    base.model.layers[0].register_forward_hook(lambda _layer, given, _out: widths.append(given[0].shape[1]))
    decode(base, PROMPTS[:1], config, decoder="joint")
    assert widths[0] == 9 and set(widths[1:]) == {1}  # the token before the masked position


def test_samples_of_one_prompt_differ_by_row_and_seed() -> None:
    base, how = base_of(), {"new_tokens": 40, "seed": 5}
    seven = ar_sample(base, [[1, 5]] * 7, rows=range(7), batch_size=7, **how)
    assert len(set(map(tuple, seven))) == 7
    assert seven[5:] == ar_sample(base, [[1, 5]] * 2, rows=[5, 6], batch_size=2, **how)
    assert seven != ar_sample(base, [[1, 5]] * 7, rows=range(7), batch_size=7, new_tokens=40, seed=6)


def test_the_fast_form_samples_the_same() -> None:
    base, how = base_of("qwen2"), {"batch_size": 3, "rows": ROWS, "decoder": "joint"}
    config = DecodeConfig(tokens_per_step=1, max_new_tokens=40, temperature=1.2, top_p=0.9, seed=3)
    wanted, got = (
        {n: row for numbers, made in decode_many(base, PROMPTS, config, **how, eager=eager)
         for n, row in zip(numbers, made.tokens_BL[:, -40:].tolist(), strict=True)}
        for eager in (True, False)
    )  # fmt: skip
    assert got == wanted and any(IM_END in row for row in wanted.values())


def test_what_cannot_be_sampled_is_refused(tmp_path: Path) -> None:
    base, how = base_of(), {"new_tokens": 2, "seed": 0}
    assert ar_sample(base, [], rows=[], batch_size=1, **how) == []
    with pytest.raises(InputError, match="1 row ids for 2 prompts"):
        ar_sample(base, [[1], [2]], rows=[0], batch_size=1, **how)
    with pytest.raises(InputError, match="batch_size is 0"):
        ar_sample(base, [[1]], rows=[0], batch_size=0, **how)
    with pytest.raises(InputError, match="a prompt is empty, or begins with a mask; base"):
        ar_sample(base, [[1], []], rows=[0, 1], batch_size=1, **how)
    with pytest.raises(InputError, match="take joint, since it writes one token a pass"):
        decode(base, [[1]], DecodeConfig(max_new_tokens=2), decoder="adjust")
    folder = save_tiny(tmp_path)
    with pytest.raises(InputError, match="is an autoregressive model, which takes no tokenizer"):
        load_base(str(folder), tokenizer=str(folder))
    with pytest.raises(InputError, match="writes one token a pass, as joint does: g has nothing to learn"):
        _check_blocks(TrainConfig(base=str(folder)), base)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(InputError, match="is quantized"):
        load_base(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    with pytest.raises(InputError, match=r"of family 'llama'; known are .*autoregressive llama, qwen2, qwen3"):
        load_base(str(folder))
    (folder / "config.json").write_text(json.dumps(config))
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(folder)
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers that are not finite"):
        load_base(str(folder))


@pytest.mark.parametrize(("vocab", "mask"), [(104, 103), (100, 3)])
def test_what_holds_a_place_need_not_be_unused(vocab: int, mask: int) -> None:
    """A padding row of the head, or the unknown token: the same text, but for that token."""
    tokenizer, model = tiny_tokenizer(), tiny_model(vocab=vocab)
    tokenizer.get_vocab = lambda: {f"{n}": n for n in range(100)} | {"<|endoftext|>": 0}
    tokenizer.unk_token = tokenizer.convert_ids_to_tokens(3)
    base = autoregressive_base(model, tokenizer)
    assert base.spec.mask_id == mask
    got = ar_sample(base, PROMPTS, rows=ROWS, batch_size=8, new_tokens=20, temperature=0.0)
    for prompt, row in zip(PROMPTS, got, strict=True):
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=list(base.spec.end_ids),
            suppress_tokens=[mask, *range(100, vocab)],
        )  # fmt: skip
        assert row == made[0, len(prompt) :].tolist()


def test_sampling_keeps_few_buffers_and_lets_go_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls with prompts of many lengths: the latest buffers, and others up to a bound."""
    base, how = base_of(), {"new_tokens": 4, "batch_size": 16, "temperature": 0.0}
    monkeypatch.setattr("adjust_dlm.data.ar.decode_many", functools.partial(decode_many, eager=False))
    for most, kept in ((engine.MOST_BYTES, 5), (0, 1)):
        monkeypatch.setattr(engine, "MOST_BYTES", most)
        base.workspace = None
        for n in range(5):
            ar_sample(base, [[1] * (4 + 20 * n)] * 16, rows=range(16), **how)
        assert len(base.workspace.lanes) == kept
    source = Source(base, base.tokenizer, read_vocabulary(base.tokenizer, tiny_model().config))
    ar_sample(source.endless, [[1, 2]], rows=[0], **how)
    held = weakref.ref(source.endless.workspace)
    source.forget()
    gc.collect()
    assert held() is None and base.workspace is None
