"""Questions with known answers: the split by fact, and the corpus and chats that keep to it."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm.bases.autoregressive import autoregressive_base, read_vocabulary
from adjust_dlm.data import canvases as canvases_module
from adjust_dlm.data import questions as module
from adjust_dlm.data.ar import ar_replies, ar_sample
from adjust_dlm.data.canvases import CorpusConfig, Source
from adjust_dlm.data.corpus import build_corpus, load_corpus
from adjust_dlm.data.questions import WORDING, Fact, asks_held_out, facts, is_held_out, questions
from adjust_dlm.types import InputError
from helpers import load_recipe
from tiny_ar import IM_END, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def source() -> Source:
    model = tiny_model()
    return Source(autoregressive_base(model, TOKENIZER), TOKENIZER, read_vocabulary(TOKENIZER, model.config))


def test_no_training_question_names_what_is_held_out() -> None:
    kept = {fact.about[0].lower() for _, fact in load_recipe("answers").held_out_questions()}
    seen: dict[str, set[str]] = {kind: set() for kind in WORDING}
    for text, fact in itertools.islice(questions(0), 20_000):
        assert not kept & {name.lower() for name in (*fact.about, *fact.answers)}, fact
        assert not asks_held_out(text), text
        seen[fact.kind].add(text)
    for kind in WORDING:  # each kind is asked about all its facts, in all wordings
        clean = [fact for fact in facts() if fact.kind == kind and fact.is_clean()]
        assert len(seen[kind]) >= 0.5 * sum(len(fact.wordings()) for fact in clean)
        assert clean or kind in ("day after", "day before")  # next to each other day stands one that is held out


def test_held_out_questions_are_each_fact_once_and_all_are_recognized_in_every_wording() -> None:
    asked = load_recipe("answers").held_out_questions()
    assert len({fact for _, fact in asked}) == len(asked) == sum(fact.is_held_out() for fact in facts())
    assert {fact.kind for _, fact in asked[:20]} == set(WORDING)
    for _, fact in asked:
        for text in fact.wordings():
            assert asks_held_out(text), text
    assert all(f.is_held_out() for _, f in itertools.islice(questions(1, held_out=True), 500))


def test_two_orders_of_a_pair_and_all_its_operations_share_their_split() -> None:
    by_pair: dict[frozenset[str], set[bool]] = {}
    for fact in facts():
        if fact.kind in ("plus", "minus", "times"):
            by_pair.setdefault(frozenset(fact.asked), set()).add(fact.is_held_out())
    assert all(len(split) == 1 for split in by_pair.values())
    share = sum(split == {True} for split in by_pair.values()) / len(by_pair)
    assert 0.25 < share < 0.42


def test_answers_are_right_by_arithmetic_and_never_stand_in_the_question() -> None:
    operate = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    for fact in facts():
        if fact.kind in operate:
            a, b = map(int, fact.asked)
            assert fact.answers == (str(operate[fact.kind](a, b)),)
        if fact.kind not in ("plural", "past", "color", "symbol"):  # sheep: sheep; an orange is orange
            assert not fact.right(" ".join(fact.asked)), fact


def test_a_right_reply_has_the_word_itself() -> None:
    capital = next(fact for fact in facts() if fact.asked == ("France",) and fact.kind == "capital")
    assert capital.right("It is paris.") and not capital.right("the Parisian way")
    symbol = next(fact for fact in facts() if fact.asked == ("nitrogen",))
    assert symbol.right("It is N.") and not symbol.right("It is n.")
    total = Fact("plus", ("2", "3"), ("5",), ("2 3",))
    assert total.right("2 + 3 = 5.") and not total.right("2 + 3 = 55") and not total.right("15")


def test_a_chat_is_kept_unless_it_asks_for_something_held_out() -> None:
    country = next(f.asked[0] for f in facts() if f.kind == "capital" and f.is_held_out())
    pair = next(f.asked for f in facts() if f.kind == "plus" and f.is_held_out())
    word = next(f.asked[0] for f in facts() if f.kind == "opposite" and f.is_held_out())
    assert asks_held_out(f"Tell me about {country.lower()}!")
    assert asks_held_out(f"Bob has {pair[1]} and {pair[0]} apples") == is_held_out(" ".join(sorted(pair, key=int)))
    assert asks_held_out(f"an antonym for {word}?") and not asks_held_out(f"Why are some things {word}?")
    assert not asks_held_out("Write a story about a dog who is 3 years old.")


@pytest.mark.parametrize(
    "text",
    [
        "What is Japan's capital?", "WHAT IS THE JAPANESE CAPITAL?", "Name a Japan-based company.",
        "How many months are there in a year?", "How many sides does a square have?", "How many continents are there?",
        "How many legs do dogs have?", "What color are sapphires?", "What are baby dogs called?",
        "What is the singular of feet?", "what is three plus four", "Three apples and four pears?", "Add 3 to 4.",
        "What is 4 multiplied by 3?", "3 \u00d7 4", "If I have 4 apples and buy 3 more, how many in total?",
    ],
)  # fmt: skip
def test_a_chat_is_not_kept_however_it_asks_for_something_held_out(text: str) -> None:
    assert all(map(is_held_out, ("Japan", "dog", "foot", "sapphire", "3 4", "months in a year", "sides in a square")))
    assert asks_held_out(text)


def test_a_chat_is_kept_if_it_only_counts_or_has_other_numbers() -> None:
    assert not is_held_out("3 5")
    for text in ("three plus five", "Add 3 to 5.", "How many days are in a week?", "Dogs are 3 or 4 years old.",
                 "I was born in 1934.", "Is a square larger than its sides?"):  # fmt: skip
        assert not asks_held_out(text), text


def test_replies_are_those_of_each_question_alone() -> None:
    base, asked = autoregressive_base(tiny_model(), TOKENIZER), ["ab?", "cde?", "fg?", "hijk?", "z?"]
    together = ar_replies(base, asked, new_tokens=6, batch_size=4, temperature=0.7, seed=5, first_row=10)
    for row, text in enumerate(asked, start=10):
        prompt = TOKENIZER.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        alone = ar_sample(base, [prompt], rows=[row], new_tokens=6, batch_size=1, seed=5, temperature=0.7, top_p=0.95)
        assert together[row - 10] == alone[0]


def test_the_corpus_holds_right_replies_that_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def replies(base: Any, texts: list[str], **options: Any) -> list[list[int]]:
        asked.extend(texts)
        known = {text: fact for seed in (0, 1) for text, fact in itertools.islice(questions(seed), 3000)}
        known |= {text: fact for f in facts() for text in f.wordings() for fact in [f]}
        out = []
        for n, text in enumerate(texts):
            reply = base.tokenizer.encode(f"It is {known[text].answers[0]}.", add_special_tokens=False)
            good, wrong, endless = [*reply, IM_END], [*base.tokenizer.encode("No."), IM_END], reply
            out.append((good, wrong, endless)[n % 3])
        return out

    monkeypatch.setattr(canvases_module, "ar_replies", replies)
    monkeypatch.setattr(canvases_module, "QUESTIONS_AT_ONCE", 9)
    config = CorpusConfig(text=0, chat=0, lists=0, questions=12, heldout=6, length=160, sample_batch=9)
    build_corpus(tmp_path, config, source())
    for split, rows in (("train", 12), ("heldout", 6)):
        corpus = load_corpus(tmp_path, split)
        assert len(corpus.tokens_NL) == rows
        for tokens, prompt in zip(corpus.tokens_NL.tolist(), corpus.prompt_len_N.tolist(), strict=True):
            text = TOKENIZER.decode(tokens[:prompt]).removeprefix("<|im_start|>user\n")
            question = text.removesuffix("<|im_end|>\n<|im_start|>assistant\n")
            assert question in asked[::3] and asks_held_out(question) == (split == "heldout")
            reply = TOKENIZER.decode(tokens[prompt : tokens.index(IM_END, prompt)])
            assert reply.startswith("It is ") and set(tokens[tokens.index(IM_END, prompt) :]) == {IM_END}
    monkeypatch.setattr(canvases_module, "ar_replies", lambda *_, **__: [[68, IM_END]] * 9)
    with pytest.raises(InputError, match="only 0 of 9 questions are answered right; ask for none"):
        build_corpus(tmp_path / "none", config, source())


def test_the_tables_have_no_entry_twice() -> None:
    assert len({(fact.kind, fact.asked) for fact in facts()}) == len(facts())
    assert all(fact.answers and all(fact.answers) and all(fact.asked) for fact in facts())
    assert module.HELD_OUT_EVERY == 3


def test_prompts_are_no_shard_of_a_corpus_and_ask_nothing_held_out() -> None:
    from adjust_dlm.data.prompts import open_prompts
    from tiny_ar import chat_base

    base = chat_base(context=256)
    made = [base.tokenizer.decode(ids) for ids in open_prompts("questions", base, rows=40, seed=0).prompts]
    for seed in range(3):
        texts = [text for text, _ in itertools.islice(questions(seed), 40)]
        assert not all(text in prompt for text, prompt in zip(texts, made, strict=True))
    own = [text for text, _ in itertools.islice(questions(-1), 40)]
    assert all(text in prompt for text, prompt in zip(own, made, strict=True))
    assert not any(asks_held_out(text) for text in own)
