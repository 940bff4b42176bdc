"""lm-evaluation-harness runs our decoders: what reaches the model, what reaches the scorer, what is refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager, manager

import printed
from adjust_dlm.bases import Base
from adjust_dlm.bases import base as registry
from adjust_dlm.decoders import decode
from adjust_dlm.eval.downstream import cut_at_stop
from adjust_dlm.eval.lm_eval import AdjustLM, main
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.types import DecodeConfig, InputError
from helpers import count_passes, tiny_sampler
from tiny_ar import BOS, chat_base

QUESTIONS = ["one and one?", "Is it so?", "a", "Who was it that sang so long and so well?", "b c d"]
DOCS = Path(__file__).parents[1] / "docs" / "evaluation.md"
LINES = DOCS.read_text(encoding="utf-8").replace("\\\n", " ")
COMMANDS = re.findall(r"^python -m adjust_dlm.eval.lm_eval (.*)$", LINES, re.MULTILINE)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Base:
    """A random Dream that is found under the name tiny."""
    made = chat_base(context=256)
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    registry.register_base("tiny", "a random Dream")(lambda **_: made)
    return made


@pytest.fixture
def g(base: Base, tmp_path: Path) -> Path:
    tiny_sampler(base).save(tmp_path / "g")
    return tmp_path / "g"


def task(folder: Path, rows: list[dict[str, str]], **changes: Any) -> dict[str, Any]:
    """A task file of one's own and its data, read as the harness does."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "task": "own", "dataset_path": "json", "output_type": "generate_until", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")},
        "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["e", ""], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (folder / "own.yaml").write_text(yaml.safe_dump(config | changes), encoding="utf-8")
    return {"tasks": ["own"], "task_manager": TaskManager(include_path=str(folder), include_defaults=False)}


def evaluated(what: dict[str, Any], model_args: str | dict[str, Any], **settings: Any) -> Any:
    shared = {"model": "adjust", "device": "cpu", "batch_size": 2, "bootstrap_iters": 0}
    return lm_eval.simple_evaluate(model_args=model_args, **{**shared, **what, **settings})


def texts_of(results: Any) -> list[list[str]]:
    return [sample["resps"][0] for sample in results["samples"]["own"]]


def alone(base: Base, ids: list[int], row: int, sampler: Any, *, decoder: str = "adjust", **settings: Any) -> Any:
    """One row of evaluation, decoded by itself: its text before the first e, and its base passes."""
    own = {name: settings.pop(name) for name in ("tau",) if name in settings}
    config = DecodeConfig(**{"max_new_tokens": 12, "temperature": 0.0, **settings})
    result = decode(base, [ids], config, decoder=decoder, sampler=sampler, rows=[EVALUATION_ROWS + row], **own)
    text = base.decode(result.tokens_BL[0, -config.max_new_tokens :].tolist())
    return cut_at_stop(text, ["e"]), int(result.base_calls_B[0])


@pytest.mark.parametrize(
    ("model_args", "settings"),
    [
        ("", {"tokens_per_step": 4}),
        ("tokens_per_step=2,seed=5,order=random", {"tokens_per_step": 2, "seed": 5, "order": "random"}),
        ("decoder=joint", {"decoder": "joint"}),
        ("decoder=threshold,tau=0.3", {"decoder": "threshold", "tau": 0.3}),
        ("decoder=threshold:tau=0.3", {"decoder": "threshold", "tau": 0.3}),
    ],
)
def test_a_task_is_scored_as_its_texts_are(
    base: Base, g: Path, tmp_path: Path, model_args: str, settings: dict[str, Any]
) -> None:
    sampler = tiny_sampler(base)
    made = [alone(base, base.encode(ask), n, sampler, **settings) for n, ask in enumerate(QUESTIONS)]
    texts, passes = [text for text, _ in made], [calls for _, calls in made]
    rows = [{"question": ask, "answer": texts[n] if n < 3 else "nothing"} for n, ask in enumerate(QUESTIONS)]
    out = evaluated(task(tmp_path, rows), ",".join(filter(None, [f"base=tiny,sampler={g}", model_args])))
    assert texts_of(out) == [[text] for text in texts] and len({*texts}) == len(texts)
    assert out["results"]["own"]["exact_match,none"] == 3 / 5
    assert out["config"]["base_fingerprint"] == base.fingerprint
    assert out["config"]["costs"]["base_calls"] == sum(passes) / len(passes)


def plain(folder: Path, **changes: Any) -> dict[str, Any]:
    return task(folder, [{"question": ask, "answer": "x"} for ask in QUESTIONS], **changes)


def test_a_task_says_what_it_wants_and_the_command_line_comes_before_it(base: Base, g: Path, tmp_path: Path) -> None:
    sampler, args = tiny_sampler(base), f"base=tiny,sampler={g},temperature=0.5,max_new_tokens=5"

    def expected(**settings: Any) -> list[list[str]]:
        more = {"tokens_per_step": 4, **settings}
        return [[alone(base, base.encode(ask), n, sampler, **more)[0]] for n, ask in enumerate(QUESTIONS)]

    silent = plain(tmp_path, generation_kwargs={"until": ["e"]})
    assert texts_of(evaluated(silent, args)) == expected(temperature=0.5, max_new_tokens=5)
    warm = plain(tmp_path, generation_kwargs={"until": "e", "temperature": 0.9, "max_tokens": 6, "top_p": 0.8})
    assert texts_of(evaluated(warm, args)) == expected(temperature=0.9, max_new_tokens=6, top_p=0.8)
    greedy = plain(tmp_path)
    assert texts_of(evaluated(greedy, args)) == expected(temperature=0.0)
    asked = {"gen_kwargs": "do_sample=true,temperature=0.7,tokens_per_step=2"}
    assert texts_of(evaluated(plain(tmp_path), args, **asked)) == expected(temperature=0.7, tokens_per_step=2)


def test_a_document_has_one_row_whatever_is_decoded_with_it(base: Base, tmp_path: Path) -> None:
    """Its repeats are further rows, as completions of a problem are in `adjust eval gsm8k`."""
    hot = {
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0},
        "repeats": 2,
    }
    what = {"base": "tiny", "decoder": "parallel", "tokens_per_step": 3, "seed": 2}
    settings = {"decoder": "parallel", "tokens_per_step": 3, "seed": 2, "temperature": 1.0}
    made = [
        [alone(base, base.encode(ask), 2 * n + again, None, **settings)[0] for again in range(2)]
        for n, ask in enumerate(QUESTIONS)
    ]
    assert all(first != second for first, second in made)
    whole = evaluated(plain(tmp_path, **hot), what, batch_size=3)
    assert [sample["resps"][0] for sample in whole["samples"]["own"]] == made
    some = evaluated(plain(tmp_path, **hot), what, limit=2, batch_size=1)
    assert [sample["resps"][0] for sample in some["samples"]["own"]] == made[:2]
    model = AdjustLM("tiny", "parallel", tokens_per_step=3, seed=2, device="cpu", batch_size="4")
    given = {"until": [], "temperature": 1.0, "max_gen_toks": 12}
    asked = [Instance("generate_until", {}, (QUESTIONS[n], given), 0, ("own", n, 1)) for n in (4, 1)]
    rows = [line.row for line in (model.generate_until(asked, disable_tqdm=True) and model.made)]
    assert rows == [EVALUATION_ROWS + 4, EVALUATION_ROWS + 1]


def test_chats_are_those_of_the_template(base: Base, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "2?"},
    ]
    model = AdjustLM("tiny", "joint", device="cpu")
    text = model.apply_chat_template(turns)
    assert model.encode(text) == base.encode_messages(turns) and model.encode("one?")[0] == BOS != model.encode(text)[0]
    begun = model.apply_chat_template([*turns, {"role": "assistant", "content": "It"}], add_generation_prompt=False)
    assert begun == text + "It"
    few = {"num_fewshot": 1, "fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}, "description": "Add."}
    out = evaluated(plain(tmp_path, **few), "base=tiny,decoder=joint", apply_chat_template=True)
    shown = [{"role": "system", "content": "Add."}, {"role": "user", "content": QUESTIONS[0]}]
    shown += [{"role": "assistant", "content": "x"}, {"role": "user", "content": QUESTIONS[3]}]
    assert texts_of(out)[3] == [alone(base, base.encode_messages(shown), 3, None, decoder="joint")[0]]
    with pytest.raises(InputError, match="'other'"):
        model.chat_template("other")


def test_answers_that_the_harness_has_kept_cost_no_pass(base: Base, tmp_path: Path) -> None:
    kept = {"use_cache": str(tmp_path / "answers")}
    first = evaluated(plain(tmp_path), "base=tiny,decoder=joint", limit=2, **kept)
    passes = count_passes(base)
    again = evaluated(plain(tmp_path), "base=tiny,decoder=joint", limit=2, **kept)
    assert texts_of(again) == texts_of(first) and passes.calls == 0 and "costs" not in again["config"]
    more = evaluated(plain(tmp_path), "base=tiny,decoder=joint", **kept)
    assert texts_of(more)[:2] == texts_of(first) and passes.calls > 0
    assert more["config"]["costs"]["base_calls"] == 12


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"generation_kwargs": {"until": [], "num_beams": 4}},
            "document 0 of task own asks .* 'num_beams'; .*known are until",
        ),
        (
            {"generation_kwargs": {"until": [], "max_gen_toks": 250}},
            "document 0 of task own has 13 tokens; with 250 new",
        ),
        ({"generation_kwargs": {"until": [], "max_gen_toks": 0}}, "max_new_tokens is 0"),
        ({"generation_kwargs": {"until": [], "max_gen_toks": 8, "temperature": -1.0}}, "temperature is -1.0"),
        (
            {"output_type": "multiple_choice", "doc_to_choice": ["x", "y"], "metric_list": [{"metric": "acc"}]},
            "task own asks for the likelihood of given texts; .*output_type generate_until",
        ),
        (
            {"output_type": "loglikelihood_rolling", "metric_list": [{"metric": "byte_perplexity"}]},
            "task own asks for the l",
        ),
    ],
)
def test_what_cannot_be_decoded_is_refused_before_the_first_pass(
    base: Base, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    passes = count_passes(base)
    with pytest.raises(InputError, match=said):
        evaluated(plain(tmp_path, **changes), "base=tiny,decoder=joint")
    assert passes.calls == 0


@pytest.mark.parametrize(
    ("model_args", "said"),
    [
        ("base=tiny,decoder=paralel", "unknown decoder 'paralel'; did you mean parallel"),
        ("base=tiny,pretrained=smol", "unknown model argument 'pretrained'; .*known are base"),
        ("base=tiny,decoder=threshold,tokens_per_stp=2", "'tokens_per_stp'; did you mean tokens_per_step"),
        ("base=tiny,decoder=joint,tau=0.9", "unknown model argument 'tau'"),
        ("base=tiny,tokens_per_step=0", "tokens_per_step is 0"),
        ("base=tiny", "no sampler ships for base 'tiny'"),
        (
            "base=tiny,decoder=joint,max_batch_size=4",
            "unknown model argument 'max_batch_size'; did you mean batch_size",
        ),
    ],
)
def test_bad_model_arguments_are_named(base: Base, model_args: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        get_model("adjust").create_from_arg_string(model_args, {"batch_size": 1})
    with pytest.raises(InputError, match="batch_size is auto"):
        AdjustLM("tiny", "joint", batch_size="auto")


def test_model_arguments_come_before_flags_and_their_defaults(base: Base) -> None:
    make = get_model("adjust").create_from_arg_obj
    flags = {"batch_size": "1", "max_batch_size": None, "device": "cuda:0"}  # as the command line fills them in
    made = make({"base": "tiny", "decoder": "joint"}, flags)
    assert (made.batch_size, made.base) == (1, base)
    assert make({"base": "tiny", "decoder": "joint", "batch_size": 3, "device": "cpu"}, flags).batch_size == 3
    with pytest.raises(InputError, match="device is 'cuda:99'"):
        make({"base": "tiny", "decoder": "joint"}, flags | {"device": "cuda:99"})


def test_the_harness_keeps_its_own_models() -> None:
    assert get_model("adjust") is AdjustLM and get_model("dummy").__name__ == "DummyLM"


def test_without_the_harness_one_line_says_what_to_install() -> None:
    program = "import sys; sys.modules['lm_eval'] = None; import adjust_dlm.eval.lm_eval"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("pip install 'adjust-dlm[lm-eval]'")


@pytest.fixture
def _few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness finds its gsm8k tasks alone: to read all that it ships takes seconds."""
    folder = Path(manager.__file__).parent / "gsm8k"
    assert folder.is_dir()
    monkeypatch.setattr(manager, "__file__", str(folder / "manager.py"))


@pytest.mark.usefixtures("_few_tasks")
def test_printed_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The harness's own gsm8k tasks, whole, on two rows of our own."""
    rows = datasets.Dataset.from_list([printed.TASK | {"question": f"What is {n}?"} for n in range(6)])
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: datasets.DatasetDict(train=rows, test=rows))
    monkeypatch.chdir(tmp_path)
    printed.fill(tmp_path, monkeypatch)
    assert len(COMMANDS) >= 2
    for command in COMMANDS:
        small = ["--limit", "1", "--gen_kwargs", "max_gen_toks=8"]
        monkeypatch.setattr(sys, "argv", ["lm_eval", *shlex.split(command), *small])
        assert main() == 0, capfd.readouterr().err
        assert re.search(r"\|gsm8k\w*\|.*exact_match", capfd.readouterr().out)


@pytest.mark.usefixtures("_few_tasks")
def test_an_error_of_the_command_line_is_one_line(
    base: Base, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lm_eval", *shlex.split(COMMANDS[0]), "--model_args", "base=tiny,tau=1"])
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("adjust: error: unknown model argument 'tau'")
