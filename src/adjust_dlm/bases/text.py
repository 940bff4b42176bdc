"""The tokenizer of an adapted base: `tokenizers` and a chat template; importing transformers would take a second.

Same answers as transformers' `PreTrainedTokenizerFast` for the calls that a base makes and templates that use nothing
but the messages (a test compares them); `adjust adapt` writes such a template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adjust_dlm.types import InputError


class FileTokenizer:
    """A `tokenizer.json` and a chat template.

    Attributes:
        chat_template: Jinja source with `messages` and `add_generation_prompt`, or None.
    """

    def __init__(self, file: Path, chat_template: str | None) -> None:
        """Reads the file; raises InputError if it is no tokenizer."""
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing narrower
            raise InputError(f"cannot read the tokenizer {file}: {error}") from error
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids; special tokens that stand in the text are recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Names of ids in the vocabulary; None for an id that is not there."""
        return [self._tokenizer.id_to_token(token) for token in ids]

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> Any:
        """The template's text, or its ids; raises InputError if there is no template or the messages do not fit it."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if not self.chat_template:
            raise InputError("this base has no chat template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            text = environment.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise InputError(f"the messages do not fit the chat template: {error}") from error
        return self.encode(text) if tokenize else text
