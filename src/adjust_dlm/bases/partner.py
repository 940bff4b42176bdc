"""The autoregressive partner of a base: p(x_i | x_<i) over the same token ids, for decoders that ask a second model."""

from __future__ import annotations

import hashlib
import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from adjust_dlm.bases.autoregressive import load_ar
from adjust_dlm.bases.base import Base, BaseSpec, Partner
from adjust_dlm.bases.transformer import sampled_rows
from adjust_dlm.types import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE = "Two tokenizers that agree on this text, 1234567890 + 42.0, <tags>\n\tdef f(x): return x  # and that"


class CausalPartner(Partner):
    """Any causal LM of transformers whose logits are its output embedding times its last hidden state."""

    def __init__(self, model: PreTrainedModel, spec: BaseSpec, *, name: str) -> None:
        """Checks that the model is causal and plain-headed.

        Raises:
            InputError: it is not.
        """
        self.model, self.spec, self.name = model, spec, name
        require_plain_head(model, require_causal(model, spec.end_ids[0] if spec.end_ids else 0, model.device))
        # transformers renamed the argument between the floor version and now.
        known = inspect.signature(model.base_model.forward).parameters
        self._memory_name = "cache" if "cache" in known else "past_key_values"
        rows = [sampled_rows(weight).view(torch.int16).numpy() for weight in model.parameters()]
        self.fingerprint = hashlib.sha256(b"".join(row.tobytes() for row in rows)).hexdigest()
        self._embedded = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]

    @torch.no_grad()
    def read(self, tokens_BN: Tensor, real_BL: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        """See `Partner.read`."""
        most = int(tokens_BN.max())
        require(most < self._embedded, f"partner {self.name!r} knows ids up to {self._embedded - 1}, not {most}")
        from transformers import DynamicCache

        memory = DynamicCache() if memory is None else memory
        positions_BL = (real_BL.long().cumsum(-1) - 1).clamp_min(0)
        out = self.model.base_model(
            input_ids=tokens_BN, attention_mask=real_BL, position_ids=positions_BL[:, -tokens_BN.shape[1] :],
            use_cache=True, **{self._memory_name: memory},
        )  # fmt: skip
        return out.last_hidden_state, memory

    def head(self, h_RD: Tensor) -> Tensor:
        """See `Partner.head`."""
        return output_embedding(self.model)(h_RD)


def load_partner(base: Base, source: str | None = None) -> Partner:
    """The base's own partner, or the causal LM at `source`, which must have been made with the same tokenizer.

    Raises:
        InputError: the base has none of its own, nothing there, or a model that is not causal.
    """
    if source is None:
        own = base.partner()
        if own is not None:
            return own
        source = base.ar_source
    require(
        source is not None,
        f"base {base.spec.name!r} has no autoregressive partner of its own; name a causal LM with the same tokenizer",
    )
    model, tokenizer = load_ar(str(source), device=base.device, dtype=base.dtype)
    _require_same_ids(base, str(source), tokenizer, int(model.config.vocab_size))
    return CausalPartner(model, base.spec, name=str(source))


def _require_same_ids(base: Base, source: str, tokenizer: Any, vocab_size: int) -> None:
    """Raises InputError unless a text has the same ids in both; without tokenizers the number of ids decides."""
    if base.tokenizer is None:
        same = vocab_size == base.spec.vocab_size
    else:
        ids = [t.encode(_PROBE, add_special_tokens=False) for t in (base.tokenizer, tokenizer)]
        same = ids[0] == ids[1]
    require(same, f"partner {source!r} has another tokenizer than base {base.spec.name!r}: its ids mean other words")


# What is asked of any causal LM of transformers ------------------------------------------------------------------


@torch.inference_mode()
def last_hidden(model: PreTrainedModel, ids_BL: Tensor) -> Tensor:
    """Last hidden states [B, L, D] of a causal model, after its final norm, without logits and cache."""
    return model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state


def require_causal(model: PreTrainedModel, token: int, device: torch.device | str) -> Tensor:
    """Raises `InputError` unless the model is in eval mode and a later token leaves an earlier state alone.

    Returns:
        The probe, ids [2, 4].
    """
    name = type(model).__name__
    require(not cast(nn.Module, model).training, f"{name} is in training mode; call model.eval() first")
    other = token - 1 if token else 1
    probe_BL = torch.tensor([[token] * 4, [token, other, other, other]], device=device)
    first_BD = last_hidden(model, probe_BL)[:, 0]
    require(_close(first_BD[0], first_BD[1], 1e-3), f"{name} looks at later tokens; it must be a causal model")
    return probe_BL


def require_plain_head(model: PreTrainedModel, probe_BL: Tensor) -> None:
    """Some families scale or cap the logits after the head; scoring without it would be silently wrong."""
    head = output_embedding(model)
    with torch.inference_mode():
        logits_BLV = head(last_hidden(model, probe_BL))
        expected_BLV = model(input_ids=probe_BL, use_cache=False).logits
    message = f"{type(model).__name__} changes the logits after its output embedding; such models are not supported"
    require(_close(logits_BLV, expected_BLV, 1e-2), message)


def _close(a: Tensor, b: Tensor, share: float) -> bool:
    return bool((a - b).abs().max() <= share * b.abs().max())


def output_embedding(model: PreTrainedModel) -> nn.Linear:
    """The head of a causal LM."""
    head: nn.Linear | None = cast(Any, model).get_output_embeddings()
    require(head is not None, f"{type(model).__name__} has no output embedding; it must be a causal LM")
    return cast(nn.Linear, head)
