"""Prompt sources: which ids come out of which line, and which files are refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from adjust_dlm.bases import load_base
from adjust_dlm.bases.exact import ExactBase
from adjust_dlm.data.lists import list_tasks
from adjust_dlm.data.prompts import PromptSource, open_prompts
from adjust_dlm.types import InputError

BOS = 3


class Letters:
    """One id a character (its code point); chat turns are <role>content, then <assistant>."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert add_generation_prompt and not tokenize
        if messages[0]["role"] == "system":
            raise RuntimeError("this template knows no system turn")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


@pytest.fixture
def base() -> ExactBase:
    base = ExactBase(torch.ones(2, 2))
    base.tokenizer = Letters()
    facts = {"bos_id": BOS, "context": 20, "vocab_size": 1000, "token_limit": 1000}
    base.spec = type(base.spec)(**{**vars(base.spec), **facts})
    return base


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def jsonl(folder: Path, *items: Any) -> str:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def test_unconditional_is_bos_alone_for_ever(base: ExactBase) -> None:
    source = open_prompts("unconditional", base)
    assert (len(source), source.ids(0), source.ids(99_999)) == (1, [BOS], [BOS])
    assert open_prompts("unconditional", ExactBase(torch.ones(2, 2))).ids(5) == []


def test_rows_go_round(base: ExactBase, tmp_path: Path) -> None:
    source = open_prompts(jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}), base)
    assert [source.ids(row)[1] for row in range(7)] == ids("abcabca")


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"text": "t", "prompt": "p"}, "p"),
        ({"instruction": "i", "text": "t"}, "t"),
        ({"answer": "42", "question": "q", "instruction": "i"}, "q"),
        ({"instruction": "i", "messages": []}, "i"),
    ],
)
def test_the_first_field_present_wins(base: ExactBase, tmp_path: Path, item: dict[str, Any], text: str) -> None:
    assert open_prompts(jsonl(tmp_path, item), base).ids(0) == [BOS, *ids(text)]


def test_chat_uses_the_template_and_its_own_start(base: ExactBase, tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"question": "q"})
    assert open_prompts(path, base, chat=True).ids(0) == ids("<user>q<assistant>")


def test_messages_end_before_the_answer(base: ExactBase, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert open_prompts(jsonl(tmp_path, {"messages": turns}), base).ids(0) == ids("<user>q<assistant>")
    more = [*turns, {"role": "user", "content": "r"}]
    assert open_prompts(jsonl(tmp_path, {"messages": more}), base).ids(0) == ids(
        "<user>q<assistant>a<user>r<assistant>"
    )


def test_lines_of_a_text_file_keep_their_spaces(base: ExactBase, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"    return x\r\n\ty: \n \t \n")
    assert open_prompts(str(path), base).prompts == [[BOS, *ids("    return x")], [BOS, *ids("\ty: ")]]


def test_text_files_hold_one_prompt_a_line(base: ExactBase, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffone\r\n\r\n  two \n".encode())
    source = open_prompts(str(path), base)
    assert source.prompts == [[BOS, *ids("one")], [BOS, *ids("  two ")]]


def test_a_line_separator_inside_json_does_not_split_the_line(base: ExactBase, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert open_prompts(str(path), base).ids(0) == [BOS, *ids("a\u2028b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ("\n \n", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ('{"prompt": "a"}\n\n["b"]', "line 3: a JSON object is wanted"),
        ('{"title": "a"}', "line 1: none of prompt, text, question, instruction, messages is there"),
        ('{"prompt": 7}', "line 1: prompt is 7; it must be some text"),
        ('{"prompt": null, "text": "t"}', "line 1: prompt is None"),
        ('{"prompt": " "}', "line 1: prompt is ' '"),
        (r'{"prompt": "a\ud83d"}', r"line 1 holds half a character: .ud83d$"),
        (r'{"messages": [{"role": "user", "content": "\uDC00"}]}', r"line 1 holds half a character: .udc00$"),
        ('{"messages": []}', "line 1: messages holds no turn to answer"),
        ('{"messages": [{"role": "user"}]}', "line 1: messages must be a list of objects"),
        (
            '{"messages": [{"role": "system", "content": "s"}]}',
            "line 1: the chat template of base .* this template knows no system turn",
        ),
    ],
)
def test_bad_lines_are_named(base: ExactBase, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        open_prompts(str(path), base)


@pytest.mark.parametrize("content", [b"caf\xe9", b"\xed\xa0\xbd", b"\xf0\x9f\x98"], ids=["latin", "half", "cut"])
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_what_is_not_utf_8_is_refused(base: ExactBase, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(b'{"prompt": "' + content + b'"}\n')
    with pytest.raises(InputError, match=rf"{name} is not UTF-8 text: .* can't decode byte"):
        open_prompts(str(tmp_path / name), base)


def test_other_sources_are_refused(base: ExactBase, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give unconditional, lists, questions, corpus:DIR, or a"):
        open_prompts("wikipedia", base)
    with pytest.raises(InputError, match="does not exist"):
        open_prompts(str(tmp_path / "no.txt"), base)
    with pytest.raises(InputError, match="no text for a chat template"):
        open_prompts("unconditional", base, chat=True)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    with pytest.raises(InputError, match=r"latin\.txt is not UTF-8"):
        open_prompts(str(latin), base)


def test_without_a_tokenizer_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no tokenizer"):
        open_prompts(jsonl(tmp_path, {"prompt": "a"}), load_base("exact"))


def write_corpus(folder: Path) -> Path:
    """Two shards for training, one held out; chat is kind 1."""
    shards = {
        "train-text-00000": [([1, 2, 3, 4], 1, 0)],
        "train-chat-00000": [([5, 6, 70_000, 8], 3, 1), ([5, 9, 9, 9], 1, 1), ([5, 6, 70_000, 1], 3, 1)],
        "heldout-chat-00000": [([7, 7, 7, 7], 2, 1)],
    }
    for name, rows in shards.items():
        tokens, lengths, kinds = zip(*rows, strict=True)
        flat = pa.array([t for row in tokens for t in row], pa.int32())
        columns = {
            "tokens": pa.FixedSizeListArray.from_arrays(flat, 4),
            "prompt_len": pa.array(lengths, pa.int16()),
            "kind": pa.array(kinds, pa.int8()),
        }
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    manifest = {"format": 1, "settings": {"length": 4}, "shards": [f"{name}.parquet" for name in shards]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_corpus_prompts_are_the_given_part_of_chat_rows_for_training(base: ExactBase, tmp_path: Path) -> None:
    assert open_prompts(f"corpus:{write_corpus(tmp_path)}", base).prompts == [[5, 6, 70_000], [5]]


def test_a_folder_without_a_whole_corpus_is_refused(base: ExactBase, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no corpus"):
        open_prompts(f"corpus:{tmp_path}", base)
    write_corpus(tmp_path)
    (tmp_path / "train-chat-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"cannot read .*train-chat-00000\.parquet"):
        open_prompts(f"corpus:{tmp_path}", base)
    (tmp_path / "train-chat-00000.parquet").unlink()
    with pytest.raises(InputError, match="not complete"):
        open_prompts(f"corpus:{tmp_path}", base)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="is not the manifest of a corpus"):
        open_prompts(f"corpus:{tmp_path}", base)


def test_list_tasks_are_chat_turns_that_no_corpus_holds(base: ExactBase) -> None:
    source = open_prompts("lists", base, rows=50, seed=4)
    assert len(source) == 50
    texts = ["".join(map(chr, ids)) for ids in source.prompts]
    assert all(t.startswith("<user>") and t.endswith("<assistant>") and '["' in t for t in texts)
    assert open_prompts("lists", base, rows=20, seed=4).prompts == source.prompts[:20]
    assert open_prompts("lists", base, rows=20, seed=5).prompts != source.prompts[:20]
    corpus = {task.prompt for task in itertools.islice(list_tasks(4), 50)}
    assert not corpus & {t.removeprefix("<user>").removesuffix("<assistant>") for t in texts}


def test_a_prompt_that_leaves_no_room_is_named(base: ExactBase) -> None:
    source = PromptSource("mine", [[1] * 12, [1] * 13])
    source.check_fits(base, 7)
    with pytest.raises(InputError, match="prompt 1 of mine has 13 tokens; with 8 new ones that is more than 20"):
        PromptSource("mine", [[1] * 12, [1] * 13]).check_fits(base, 8)


def test_the_digest_tells_where_a_prompt_ends() -> None:
    facts = [PromptSource("x", p).facts()["sha256"] for p in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2], [3]])]
    assert facts[0] == facts[2] != facts[1]
