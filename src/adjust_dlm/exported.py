"""A sampler inside transformers: the repository that `custom_generate` runs, and what runs in it.

`model.generate(ids, custom_generate=REPO, trust_remote_code=True)` of transformers loads `custom_generate/generate.py`
of a folder or Hub repository; ours calls `generate_with`, which sees the model's own weights as our base.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from adjust_dlm.artifacts import public_name, save_pretrained
from adjust_dlm.bases import Base, BaseSpec
from adjust_dlm.bases.family import DreamBase, LladaBase
from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase, weights_fingerprint
from adjust_dlm.decoders import decode
from adjust_dlm.files import plain, write_whole
from adjust_dlm.hub import SAMPLER as CONFIG
from adjust_dlm.hub import local, read_json
from adjust_dlm.sampler import WEIGHTS, Sampler, load_sampler, require_same_base
from adjust_dlm.types import DecodeConfig, InputError, refusing, require

FACTS = "base_facts.json"
GENERATE, REQUIREMENTS = "custom_generate/generate.py", "custom_generate/requirements.txt"
_FAMILIES: dict[str, type[TransformerBase]] = {"dream": DreamBase, "llada": LladaBase, "adapted": TransformerBase}
_NOT_IN_STATES = ("max_position_embeddings", "initializer_range")  # of a shape: facts that change no state


# Export --------------------------------------------------------------------------------------------------------


def export(sampler: Sampler, base: Base, folder: Path | str, **saved: Any) -> Path:
    """Writes a sampler's folder that transformers can generate with.

    Facts of the base and a digest of its weights go into `base_facts.json`, the rest to `save_pretrained`, with the
    base's name filled in.

    Raises:
        InputError: a base that no transformers model can stand for, another base's sampler, or as `save_pretrained`.
    """
    import adjust_dlm

    require_same_base("the sampler", sampler.base_fingerprint, base)
    facts = base_facts(base)
    card, program = (Path(__file__).with_name(name).read_text() for name in ("card_export.md", "custom_generate.txt"))
    section = card.format(model_class=f"{facts['shape']['model_type'].capitalize()}ForCausalLM")  # Qwen2, Qwen3, Llama
    saved = {"base": facts["spec"]["name"], **saved}
    save_pretrained(sampler, folder, sections=[section], tags=["custom_generate"], **saved)
    needs = f"adjust-dlm>={adjust_dlm.__version__}\n"
    texts = {FACTS: json.dumps(facts, indent=2) + "\n", GENERATE: program, REQUIREMENTS: needs}
    write_whole({Path(folder, name): text for name, text in texts.items()})
    return Path(folder)


def base_facts(base: Base) -> dict[str, Any]:
    """All of a base but its weights, and a digest of those.

    Raises:
        InputError: a base that is no body with a head, or of a class that is not known here.
    """
    family = next((name for name, kind in _FAMILIES.items() if type(base) is kind), None)
    if family is None or not isinstance(base, TransformerBase):
        known = ", ".join(kind.__name__ for kind in _FAMILIES.values())
        raise InputError(f"base {base.spec.name!r} is of class {type(base).__name__}; only {known} can be exported")
    alone = base.model.config.lora_rank is not None
    require(not alone, f"base {base.spec.name!r} has adapters of masks alone, which no model of transformers can have")
    return {
        "family": family,
        "spec": {**plain(base.spec), "name": public_name(base.spec.name)},
        "next_frame": base.next_frame,
        "fingerprint": base.fingerprint,
        "weights": weights_fingerprint(base.model, base.head_matrix, base.spec.mask_id),
        "shape": _shape_facts(base.model.config),
    }


def _shape_facts(shape: Shape) -> dict[str, Any]:
    facts: dict[str, Any] = plain({key: value for key, value in asdict(shape).items() if key not in _NOT_IN_STATES})
    facts["rope"] = {key: value for key, value in facts["rope"].items() if value is not None}
    return facts


# A transformers model as a base --------------------------------------------------------------------------------


def wrap_model(model: Any, facts: Mapping[str, Any]) -> TransformerBase:
    """Our base on the weights of a transformers model: shared, nothing is copied.

    Raises:
        InputError: no `Qwen2ForCausalLM`, `Qwen3ForCausalLM` or `LlamaForCausalLM`, one neither float32 nor bfloat16 or
            on several devices, or other weights than those of `facts` (`base_facts.json`).
    """
    spec = BaseSpec(**{**facts["spec"], "end_ids": tuple(facts["spec"]["end_ids"])})
    shape = Shape.of(model.config, spec.block)
    wanted, found = facts["shape"], _shape_facts(shape)
    odd = [key for key in wanted.keys() | found.keys() if (wanted.get(key) or None) != (found.get(key) or None)]
    said = "; ".join(f"{key} is {found.get(key)!r}, wanted {wanted.get(key)!r}" for key in sorted(odd))
    require(not odd, f"the model does not fit this sampler's base: {said}")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    require(len(devices) == 1, f"the model lies on {', '.join(devices)}; it must lie on one device")
    head = model.get_output_embeddings()
    require(head is not None, f"the model is a {type(model).__name__}, without a head; load it as a CausalLM class")
    with torch.device("meta"):
        body = Body(shape)
    with refusing(f"the model's tensors are not those of a plain {shape.model_type}", RuntimeError):
        body.load_state_dict(model.base_model.state_dict(), assign=True)  # the tensor names are the same
    digest = weights_fingerprint(body, head.weight, spec.mask_id)
    require(
        digest == facts["weights"],
        f"the model's weights are not those of base {spec.name!r}: their digest is {digest[:16]}, wanted "
        f"{facts['weights'][:16]}; load the base's own checkpoint, in float32 or bfloat16",
    )
    return _FAMILIES[facts["family"]](
        body, head.weight, spec, next_frame=facts["next_frame"], fingerprint=facts["fingerprint"]
    )


# Generate ------------------------------------------------------------------------------------------------------

_SETTINGS = tuple(field.name for field in fields(DecodeConfig))
_OTHER = ("inputs", "input_ids", "attention_mask", "do_sample", "decoder", "revision", "sampler_repo")


# For each model: its base and sampler, and what they were made of (see `_load`).
_LOADED: WeakKeyDictionary[Any, tuple[tuple[Any, ...], TransformerBase, Sampler]] = WeakKeyDictionary()


def generate_with(repo: Path | str | None, model: Any, arguments: Mapping[str, Any]) -> Tensor:
    """What the exported `generate.py` does.

    Args:
        repo: the exported folder, or its Hub id.
        model: the transformers model whose `generate` was called.
        arguments: what it was called with: `inputs` or `input_ids` [B, L], `attention_mask` [B, L] for left padding,
            the settings of `DecodeConfig` (its defaults, whatever `model.generation_config` says), `do_sample=False`
            for temperature 0, `decoder`, and `revision` of a Hub repository.

    Returns:
        int64 ids [B, L + max_new_tokens], the prompts as they came in. Behind the end of a text stands the base's first
        end token.

    Raises:
        InputError: an argument that has no meaning here, padding that is not on the left, another model.
    """
    require(repo is not None, "give sampler_repo=, the sampler's folder or Hub id: it cannot be told from the call")
    given = {key: value for key, value in arguments.items() if value is not None and value is not False}
    known = sorted((*_SETTINGS, *_OTHER))
    unknown = sorted(given.keys() - set(known))
    require(not unknown, f"generate cannot use {', '.join(unknown)} here; known are {', '.join(known)}")
    settings = {key: arguments[key] for key in _SETTINGS if arguments.get(key) is not None}
    if arguments.get("do_sample") is False:
        warm = settings.setdefault("temperature", 0.0)
        require(warm == 0, f"do_sample is False and temperature {warm}; argmax is temperature 0")
    config = DecodeConfig(**settings)
    ids_BL, real_BL = _inputs(given)
    base, sampler = _load(model, str(repo), given.get("revision"))
    prompts = [row[real].tolist() for row, real in zip(ids_BL, real_BL, strict=True)]
    result = decode(base, prompts, config, decoder=given.get("decoder", "adjust"), sampler=sampler)
    out_BL = torch.nn.functional.pad(ids_BL, (0, config.max_new_tokens))
    for b, prompt in enumerate(prompts):  # masks inside a prompt are filled in, too
        width = len(prompt) + config.max_new_tokens
        out_BL[b, -width:] = result.tokens_BL[b, -width:]
    return out_BL


def _inputs(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(ids, real), both [B, L] and on the left padded if at all."""
    both = [name for name in ("inputs", "input_ids") if name in given]
    require(len(both) == 1, f"give the prompt ids once, as inputs or input_ids; found {', '.join(both) or 'neither'}")
    ids_BL = torch.as_tensor(given[both[0]]).long()
    good = ids_BL.ndim == 2 and len(ids_BL) > 0
    require(good, f"{both[0]} has shape {tuple(ids_BL.shape)}; it must be [rows, tokens]")
    real_BL = torch.as_tensor(given.get("attention_mask", torch.ones_like(ids_BL))).to(ids_BL.device).bool()
    shapes = [tuple(x.shape) for x in (real_BL, ids_BL)]
    require(shapes[0] == shapes[1], f"attention_mask has shape {shapes[0]}, the ids {shapes[1]}; they must be the same")
    holes = [b for b, row in enumerate(real_BL.tolist()) if row != sorted(row)]
    require(not holes, f"attention_mask has a 0 behind a 1 in row {holes[:1]}; pad on the left")
    return ids_BL, real_BL


def _load(model: Any, repo: str, revision: str | None) -> tuple[TransformerBase, Sampler]:
    """The base and sampler for a model, kept until its weights or the files change."""
    folder = local(repo, (CONFIG, WEIGHTS, FACTS), revision=revision)
    require((folder / FACTS).is_file(), f"{folder} was not written by `adjust export` ({FACTS} is missing)")
    stamps = [(folder / name).stat().st_mtime_ns for name in (CONFIG, WEIGHTS, FACTS) if (folder / name).is_file()]
    weights = [(p.data_ptr(), p.dtype, 0 if p.is_inference() else p._version) for p in model.parameters()]
    key = (str(folder), *stamps, *weights)
    if model not in _LOADED or _LOADED[model][0] != key:
        facts = read_json(folder / FACTS)
        lost = sorted({"family", "spec", "next_frame", "fingerprint", "weights", "shape"} - facts.keys())
        require(not lost, f"{folder / FACTS} lacks {', '.join(lost)}")
        family = facts["family"]
        require(family in _FAMILIES, f"{folder / FACTS}: family is {family!r}; known are {', '.join(_FAMILIES)}")
        base = wrap_model(model, facts)
        _LOADED[model] = key, base, load_sampler(folder, base)
    return _LOADED[model][1:]
