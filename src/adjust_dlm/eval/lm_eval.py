"""Tasks of lm-evaluation-harness with any decoder.

The harness finds models in its own package alone. So `python -m adjust_dlm.eval.lm_eval` is its command line with one
more model, `adjust`; in Python, importing this module registers that model.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NoReturn

import adjust_dlm
from adjust_dlm.bases import load_base
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.decoders import decode_many
from adjust_dlm.eval.generation import Generated, costs, generated, open_helpers
from adjust_dlm.types import DEFAULT_BASE, EVALUATION_ROWS, DecodeConfig, InputError, refusing, require
from adjust_dlm.variants import build_options, option_names, read_variant, split_settings
from adjust_dlm.words import known

with refusing("lm-evaluation-harness", ImportError, hint="; pip install 'adjust-dlm[lm-eval]'"):
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import hash_string
    from tqdm import tqdm

DEFAULTS = {"tokens_per_step": 4, "max_new_tokens": 256, "temperature": 0.0}  # the last two are the harness's own
SETTINGS = [field.name for field in fields(DecodeConfig)]


@register_model("adjust")
class AdjustLM(LM):  # type: ignore[misc]  # the harness has no types
    """A base and a decoder as a model of the harness, for tasks that generate text.

    Attributes:
        made: every row that was decoded.
    """

    def __init__(
        self, base: str = DEFAULT_BASE, decoder: str = "adjust", *, sampler: str | None = None,
        partner: str | None = None, device: str = "auto", quantize: str | None = None, eager: bool = False,
        batch_size: int | str = 1,
        **settings: Any,
    ) -> None:  # fmt: skip
        """What `--model_args` says: see `DownstreamConfig`; further `settings` are of `DecodeConfig` or the decoder.

        Raises:
            InputError: an unknown name or a bad value.
        """
        super().__init__()
        self.decoder, changes, options = read_variant(decoder)
        shared, own = split_settings(settings)
        names = [*inspect.signature(AdjustLM).parameters][:-1] + SETTINGS + option_names(self.decoder)
        for name in settings:
            require(name in names, f"unknown model argument {name!r}; {known(name, names)}")
        rows = str(batch_size)
        require(rows.isdecimal() and int(rows) > 0, f"batch_size is {rows}; it must be a whole number above 0")
        self.batch_size, self.eager, self.options = int(rows), eager, own | options
        self.config = DecodeConfig(**DEFAULTS | shared | changes)
        build_options(self.decoder, self.options)
        self.base = load_base(base, device=device, quantize=quantize)
        models = SimpleNamespace(base=base, sampler=sampler, partner=partner)
        self.helpers = open_helpers(models, self.base, [decoder])
        self.made: list[Generated] = []

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> AdjustLM:
        """From the command line, where `--model_args` come before flags: cuda:0 is a flag's default on any machine."""
        flags = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**{**flags, **({"device": "auto"} if flags.get("device") == "cuda:0" else {}), **arg_dict})

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts, cut at their stop strings.

        Document n of a task is row n of evaluation (its repeats are rows of their own), whatever else is decoded.

        Raises:
            InputError: a setting that decoding does not have, or a prompt that does not fit the base.
        """
        prompts = [self.encode(request.args[0]) for request in requests]
        asked = [self.asked(request, ids) for request, ids in zip(requests, prompts, strict=True)]
        times, rows = Counter[tuple[Any, Any]](), []
        for request in requests:
            document = (request.task_name, request.doc_id)
            rows.append(EVALUATION_ROWS + (request.doc_id or 0) * (request.repeats or 1) + times[document])
            times[document] += 1
        texts, bar = [""] * len(requests), tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until")
        how: dict[str, Any] = {"batch_size": self.batch_size, "decoder": self.decoder, "eager": self.eager or None}
        for config in dict.fromkeys(config for config, _ in asked):
            mine = [n for n, (own, _) in enumerate(asked) if own == config]
            more = {"rows": [rows[n] for n in mine], **self.helpers, **self.options}
            for which, result in decode_many(self.base, [prompts[n] for n in mine], config, **how, **more):
                fresh = generated(self.base, result)
                for n, line in zip([mine[at] for at in which], fresh, strict=True):
                    texts[n] = postprocess_generated_text(self.base.decode(line.tokens), asked[n][1], None)
                    self.cache_hook.add_partial("generate_until", requests[n].args, texts[n])
                self.made += fresh
                bar.update(len(fresh))
        bar.close()
        return texts

    def asked(self, request: Any, ids: list[int]) -> tuple[DecodeConfig, list[str]]:
        """Settings and stop strings of a request with this prompt."""
        said = {"temperature": self.config.temperature, **request.args[1]}
        given = normalize_gen_kwargs(said, self.config.max_new_tokens)
        until, new, _ = given.pop("until"), given.pop("max_gen_toks"), given.pop("do_sample")
        where = f"document {request.doc_id} of task {request.task_name}"
        for name in given:
            allowed = known(name, ["until", "do_sample", "max_gen_toks", *SETTINGS])
            require(name in SETTINGS, f"{where} asks for generation setting {name!r}; {allowed}")
        PromptSource(where, [ids]).check_fits(self.base, new)
        return self.config.but(**given, max_new_tokens=new), until

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt; one that begins with a special token is a chat, and gets no start token in front."""
        ids = self.base.encode(text)
        bare = self.base.tokenizer.encode(text, add_special_tokens=False)
        backend = getattr(self.base.tokenizer, "backend_tokenizer", None)
        added = {} if backend is None else backend.get_added_tokens_decoder()
        return bare if bare and bare[0] in added and added[bare[0]].special else ids

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> NoReturn:
        """Refuses: InputError."""
        raise InputError(
            f"task {requests[0].task_name} asks for the likelihood of given texts; that of a masked diffusion model "
            "depends on the order of positions, which the harness does not name: take tasks that generate "
            "(output_type generate_until), such as gsm8k, minerva_math500, humaneval, ifeval or mmlu_generative"
        )

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Text of a conversation, up to where the answer begins, or to the end of an answer that has begun."""
        if add_generation_prompt:
            return self.base.render_messages(chat_history)
        return self.base.render_messages(chat_history[:-1]) + chat_history[-1]["content"]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, for the record; raises InputError where it is asked for by a name."""
        require(not isinstance(chat_template, str), f"chat template {chat_template!r}: a base has one, without a name")
        return getattr(self.base.tokenizer, "chat_template", None) if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Under this name the harness keeps prompts: they depend on the template."""
        return f"adjust-{hash_string(str(self.chat_template(True)))}"

    def get_model_info(self) -> dict[str, Any]:
        """For `config` in the harness's results: what decoded, and what a text cost."""
        spent = {"costs": costs(self.made)} if self.made else {}
        facts = {"adjust_dlm": adjust_dlm.__version__, "base_fingerprint": self.base.fingerprint}
        return {**facts, "base_device": str(self.base.device), **spent}


def main() -> int:
    """The harness's command line; an exit code."""
    try:
        cli_evaluate()
    except InputError as error:
        sys.stderr.write(f"adjust: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
