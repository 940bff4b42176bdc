"""Samplers as artifacts: folders with cards, push and pull on a stand-in of the Hub, offline use, the importer."""

import base64
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

import adjust_dlm
from adjust_dlm import cli
from adjust_dlm.artifacts import CARD, RUN, from_pretrained, push_to_hub, save_pretrained, upload
from adjust_dlm.bases import base as registry
from adjust_dlm.commands.common import DecodeFlags
from adjust_dlm.decoders import decode
from adjust_dlm.eval.generation import sampler_for
from adjust_dlm.exported import export
from adjust_dlm.released import import_released
from adjust_dlm.sampler import CONFIG, WEIGHTS, Sampler, SamplerConfig
from adjust_dlm.types import DecodeConfig, InputError
from helpers import MASK, left_pad, tiny_base, tiny_config, tiny_sampler

ROW = [2, 5, MASK, 7, MASK, 9]
CELL = {
    "temperature": 1.0, "decoder": "adjust", "tokens_per_step": 4, "n": 256, "nll": 5.0412, "nll_ci95": 0.0313,
    "mauve": 0.8123, "mauve_ci95": 0.021, "gap_closed": 0.4512, "gap_closed_ci95": 0.04,
}  # fmt: skip
JOINT = {"temperature": 1.0, "decoder": "joint", "tokens_per_step": 1, "n": 256, "nll": 4.1, "nll_ci95": 0.03}
SURE = {"temperature": 1.0, "decoder": "threshold:tau=0.9", "tokens_per_step": 0, "n": 256, "nll": 4.5}
RESULT = {
    "command": "eval",
    "results": {
        "config": {"judge": "smol", "max_new_tokens": 128, "base": "/home/me/secret/b"},
        "cells": [JOINT, CELL, SURE],
    },
}


def same(one: Sampler, other: Sampler) -> bool:
    """Equal as stored: in bf16."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k].bfloat16(), b[k].bfloat16()) for k in a)


# Folders -------------------------------------------------------------------------------------------------------


def test_a_saved_folder_holds_sampler_run_and_card_and_comes_back(tmp_path: Path) -> None:
    base = tiny_base("dream")
    g = tiny_sampler(base, pairing="token")
    folder = save_pretrained(g, tmp_path / "g", run={"lr": 0.5, "trajectories": ("a", "b")}, steps=7, license="mit")
    assert sorted(p.name for p in folder.iterdir()) == sorted([CONFIG, WEIGHTS, RUN, CARD])
    facts = json.loads((folder / CONFIG).read_text())
    assert facts["base_fingerprint"] == base.fingerprint and (facts["steps"], facts["license"]) == (7, "mit")
    assert yaml.safe_load((folder / RUN).read_text()) == {"lr": 0.5, "trajectories": ["a", "b"]}
    loaded = from_pretrained(folder, base)
    assert same(loaded, g) and loaded.config == g.config and not same(loaded, tiny_sampler(base, seed=1))
    assert adjust_dlm.from_pretrained is from_pretrained and adjust_dlm.import_released is import_released


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    _, head, body = (folder / CARD).read_text().split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_card_says_what_was_given(tmp_path: Path) -> None:
    base = tiny_base("dream")
    g = tiny_sampler(base)
    training = {"base": "tiny", "trajectories": 7252, "data_digest": "ae5e53f64148128218cd"}
    save_pretrained(
        g, tmp_path, results=RESULT, training=training, heldout={"kl_1": 0.15425}, license="apache-2.0",
        base_model="org/base",
    )  # fmt: skip
    head, body = card_of(tmp_path)
    assert head["library_name"] == "adjust-dlm" and "masked-diffusion" in head["tags"]
    assert (head["license"], head["base_model"]) == ("apache-2.0", "org/base")
    assert "# ADJUST sampler for tiny\n" in body and f"`{base.fingerprint}`" in body
    assert "| data | 7252 trajectories of the base, digest `ae5e53f641481282` |" in body
    assert "| 1.0 | adjust | 4 | 256 | 5.041 +- 0.031 | 0.812 +- 0.021 | 45.1% +- 4.0% |" in body
    assert "| 1.0 | joint | 1 | 256 | 4.100 +- 0.030 |  |  |" in body
    assert "| 1.0 | threshold:tau=0.9 |  | 256 | 4.500 |  |  |" in body  # it has no K
    assert r"| KL(base\|\|g), depth 1 (nats/token) | 0.154" in body
    assert "not lossless" in body and "exactly one base" in body and "one token at a time" in body


def test_the_card_invents_nothing(tmp_path: Path) -> None:
    save_pretrained(tiny_sampler(tiny_base("dream")), tmp_path / "bare")
    head, body = card_of(tmp_path / "bare")
    assert "license" not in head and "base_model" not in head
    assert "| data | not given |" in body and "No measurements were given." in body
    save_pretrained(tiny_sampler(tiny_base("dream")), tmp_path / "path", results=RESULT)
    assert "sampler for b\n" in card_of(tmp_path / "path")[1] and "secret" not in (tmp_path / "path" / CARD).read_text()
    save_pretrained(tiny_sampler(tiny_base("dream")), tmp_path / "flat", results={"results": {"kl": 0.5, "name": "x"}})
    assert r"| KL(base\|\|g) (nats/token) | 0.5 |" in card_of(tmp_path / "flat")[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config": {}}, "provenance may not be called config"),
        ({"base_fingerprint": "0"}, "provenance may not be called base_fingerprint"),
        ({"base_model": "runs/a/b"}, "base_model is 'runs/a/b'; it must be a Hub id"),
    ],
)
def test_bad_provenance_is_refused_before_anything_is_written(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        save_pretrained(tiny_sampler(tiny_base("dream")), tmp_path / "g", **given)
    assert not (tmp_path / "g").exists()


def test_files_of_others_are_not_overwritten(tmp_path: Path) -> None:
    g = tiny_sampler(tiny_base("dream"))
    (tmp_path / CARD).write_text("# My project\n")
    with pytest.raises(InputError, match="is no sampler's model card"):
        save_pretrained(g, tmp_path)
    (tmp_path / CARD).unlink()
    (tmp_path / RUN).write_text("lr: 1\n")
    with pytest.raises(InputError, match="would be taken for this sampler's"):
        save_pretrained(g, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [RUN]
    save_pretrained(g, tmp_path, run={"lr": 2})
    save_pretrained(g, tmp_path, run={"lr": 3})  # its own card may be replaced
    assert (tmp_path / RUN).read_text() == "lr: 3\n"


def test_another_base_is_refused(tmp_path: Path) -> None:
    save_pretrained(tiny_sampler(tiny_base("dream")), tmp_path)
    other = tiny_base("dream", seed=1)
    with pytest.raises(InputError, match=f"base 'dream' has {other.fingerprint[:16]}"):
        from_pretrained(tmp_path, other)


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"revision is 'v1', but .* is no Hub id"):
        from_pretrained(tmp_path, tiny_base("dream"), revision="v1")


# The Hub -------------------------------------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """As much of the Hub as push and pull need, LFS uploads included; commits live in memory."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, list[dict[str, bytes]]] = {}  # id -> commits, each a whole tree
        self.created: list[dict[str, Any]] = []
        self.lfs: dict[str, bytes] = {}
        self.seen: list[tuple[str, str]] = []

    def tree(self, repo: str, revision: str) -> dict[str, bytes] | None:
        commits = self.repos[repo]
        return commits[-1] if revision == "main" else dict(enumerate(commits)).get(int(revision, 16))

    def sha(self, repo: str, revision: str) -> str:
        return revision if len(revision) == 40 else f"{len(self.repos[repo]) - 1:040x}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, code: int, body: Any = None, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.seen.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = path.strip("/").split("/")
        if self.headers.get("Authorization") == "Bearer hf_wrong":
            self.answer(401, {"error": "Invalid credentials"})
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            front = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            self.answer(200 if front["library_name"] else 400, {"errors": [], "warnings": []})
        elif parts[0] == "lfs":
            self.server.lfs[parts[1]] = body
            self.answer(200, {})
        elif parts[:2] == ["api", "models"] and self.known("/".join(parts[2:4])):
            self.api("/".join(parts[2:4]), parts[4:], body)
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**x, "actions": {"upload": {"href": f"{self.server.endpoint}/lfs/{x['oid']}"}}}
                for x in json.loads(body)["objects"]
            ]
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif len(parts) > 4 and parts[2] == "resolve" and self.known("/".join(parts[:2])):
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        elif parts[:2] != ["api", "models"] and parts[2:3] != ["resolve"]:
            self.answer(404, {})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def known(self, repo: str) -> bool:
        if repo not in self.server.repos:
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return repo in self.server.repos

    def create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        self.server.created.append(asked)
        new = repo not in self.server.repos
        self.server.repos.setdefault(repo, [{}])
        self.answer(200 if new else 409, {"url": f"{self.server.endpoint}/{repo}"})

    def api(self, repo: str, rest: list[str], body: bytes) -> None:
        kind, revision = (rest or ["revision"])[0], (rest[1:] or ["main"])[0]
        tree = self.server.tree(repo, revision) if kind == "commit" or len(revision) in (4, 40) else None
        if tree is None:
            self.answer(404, {"error": f"Invalid rev id: {revision}"}, X_Error_Code="RevisionNotFound")
        elif kind == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                for f in json.loads(body)["files"]
            ]
            self.answer(200, {"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]})
        elif kind == "commit":
            self.commit(repo, tree, [json.loads(line) for line in body.splitlines()])
        elif kind == "tree":
            self.answer(200, [self.entry(path, data) for path, data in tree.items()])
        else:
            siblings = [{"rfilename": path} for path in tree]
            self.answer(200, {"id": repo, "sha": self.server.sha(repo, revision), "siblings": siblings})

    def commit(self, repo: str, tree: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        files = {x["value"]["path"]: x for x in lines if x["key"] != "header"}
        made = {
            path: self.server.lfs[x["value"]["oid"]]
            if x["key"] == "lfsFile"
            else base64.b64decode(x["value"]["content"])
            for path, x in files.items()
        }
        self.server.repos[repo].append({**tree, **made})
        sha = self.server.sha(repo, "main")
        self.answer(200, {"commitUrl": f"{self.server.endpoint}/{repo}/commit/{sha}", "commitOid": sha})

    def entry(self, path: str, data: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if path.endswith(".safetensors"):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def resolve(self, repo: str, revision: str, path: str) -> None:
        data = (self.server.tree(repo, revision) or {}).get(path)
        if data is None:
            self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            return
        etag = self.entry(path, data).get("lfs", self.entry(path, data))["oid"]
        self.answer(200, data, ETag=f'"{etag}"', X_Repo_Commit=self.server.sha(repo, revision))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running stand-in; the library's other way of uploading (Xet) has a server of its own and is left out."""
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    server = Hub()
    resolve = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", resolve)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_push_and_pull(hub: Hub, tmp_path: Path) -> None:
    base = tiny_base("dream")
    g, newer = tiny_sampler(base), tiny_sampler(base, seed=1)
    url = push_to_hub(g, "me/g", private=True, run={"lr": 1}, results=RESULT, license="mit")
    assert url == f"{hub.endpoint}/me/g/commit/{1:040x}"
    asked = hub.created[0]  # the library's first major version says it in another way than its second
    assert asked["name"] == "g" and (asked.get("visibility") == "private" or asked.get("private") is True)
    assert sorted(hub.repos["me/g"][-1]) == sorted([CONFIG, WEIGHTS, RUN, CARD])
    assert "| 1.0 | adjust | 4 |" in hub.repos["me/g"][-1][CARD].decode()
    assert same(from_pretrained("me/g", base), g)
    fetched = {path for method, path in hub.seen if method == "GET" and "/resolve/" in path}
    assert {Path(path).name for path in fetched} == {CONFIG, WEIGHTS}  # neither card nor run
    push_to_hub(newer, "me/g")
    assert same(from_pretrained("me/g", base), newer)
    assert same(from_pretrained("me/g", base, revision=f"{1:040x}"), g)
    with pytest.raises(InputError, match="belongs to a base with fingerprint"):
        from_pretrained("me/g", tiny_base("dream", seed=1))


def test_what_the_hub_has_not_is_said_in_one_line(hub: Hub, tmp_path: Path) -> None:
    base = tiny_base("dream")
    with pytest.raises(
        InputError, match="no folder 'me/none' here, and the Hub gave none: RepositoryNotFoundError"
    ) as e:
        from_pretrained("me/none", base)
    assert "\n" not in str(e.value)
    push_to_hub(tiny_sampler(base), "me/g")
    with pytest.raises(InputError, match="the Hub gave none at revision 'v9': RevisionNotFoundError"):
        from_pretrained("me/g", base, revision="v9")
    hub.repos["me/other"] = [{"config.json": b"{}"}]
    with pytest.raises(InputError, match=rf"holds no sampler \({CONFIG} is missing\)"):
        from_pretrained("me/other", base)
    for name in ("no-name", "a/b/c", "/a/b", "a b/c"):
        with pytest.raises(InputError, match="it must be a Hub id, ORG/NAME"):
            push_to_hub(tiny_sampler(base), name)


def test_offline_the_cache_is_used_and_nothing_is_asked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("dream")
    push_to_hub(tiny_sampler(base), "me/g")
    from_pretrained("me/g", base)
    asked = len(hub.seen)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(from_pretrained("me/g", base), tiny_sampler(base))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(InputError, match="no folder 'me/g' here, and the Hub gave none: LocalEntryNotFoundError") as e:
        from_pretrained("me/g", base)
    assert "\n" not in str(e.value) and len(hub.seen) == asked


def test_the_flag_takes_a_folder_or_a_hub_id(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base("dream")
    g, other = tiny_sampler(base), tiny_sampler(base, seed=1)
    push_to_hub(g, "me/g")
    monkeypatch.chdir(tmp_path)
    flags = DecodeFlags(base="exact", sampler=Path("me/g"))
    assert same(sampler_for(flags, base), g)
    save_pretrained(other, "me/g")  # a folder of that name comes first
    assert same(sampler_for(flags, base), other)
    assert sampler_for(DecodeFlags(base="exact"), base) is None


def test_a_process_without_network_uses_the_cache(hub: Hub, tmp_path: Path) -> None:
    """HF_HOME and HF_HUB_OFFLINE of the environment, and the command line; also with a Hub at hand."""
    push_to_hub(tiny_sampler(tiny_base("dream")), "me/g")
    from_pretrained("me/g", tiny_base("dream"))
    asked = len(hub.seen)
    env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    argv = ["generate", "--base", "exact", "--max-new-tokens", "4", "--sampler"]
    program = (
        "import sys; from adjust_dlm.cli import main; [main([*sys.argv[2:], name]) for name in sys.argv[1].split()]"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "me/g me/none", *argv], env=env, capture_output=True, text=True, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    found, none = done.stderr.splitlines()
    # No g fits the enumerable base: a wrong fingerprint shows that the program has read the file.
    assert f"belongs to a base with fingerprint {tiny_base('dream').fingerprint[:16]}" in found
    assert none.startswith("adjust: error: no folder 'me/none' here, and the Hub gave none: LocalEntryNotFoundError")
    assert len(hub.seen) == asked


def test_transformers_generates_from_an_exported_hub_repository(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code by transformers, weights by us, both from the Hub; a pinned revision holds for both."""
    base = tiny_base("dream")
    old, new = (tiny_sampler(base, seed=seed) for seed in (0, 1))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for sampler in (old, new):
        upload(export(sampler, base, tmp_path / "out"), "me/g")
    model = Qwen2ForCausalLM(tiny_config("dream")).eval()
    model.model.load_state_dict(base.model.state_dict())
    model.lm_head.weight.data.copy_(base.head_matrix)
    settings = {"tokens_per_step": 4, "max_new_tokens": 16, "suppress_eos": True}
    wanted = []
    for sampler, revision in ((old, f"{1:040x}"), (new, None)):
        out = model.generate(
            torch.tensor([[2, 5]]), custom_generate="me/g", trust_remote_code=True, revision=revision, **settings
        )
        stored = from_pretrained(save_pretrained(sampler, tmp_path / f"at {revision}"), base)
        wanted.append(decode(base, [[2, 5]], DecodeConfig(**settings), sampler=stored).tokens_BL.tolist())
        assert out.tolist() == wanted[-1]
    assert wanted[0] != wanted[1]


def test_a_wrong_token_fails_the_push(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OSError, match="401"):
        push_to_hub(tiny_sampler(tiny_base("dream")), "me/g")
    assert not hub.repos


# The published checkpoint --------------------------------------------------------------------------------------

OURS_TO_THEIRS = {
    "mix": "drafter.down_project.0", "layer.layer": "drafter.layers.0.0", "norm_embed": "drafter.norm_embed.0",
    "norm_hidden": "drafter.norm_hidden.0", "norm_out": "drafter.norm_postattn.0",
}  # fmt: skip
D = 32


def published(seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint of the published layout for the tiny Dream, from a list of names; with tensors of the base."""
    shapes: dict[str, tuple[int, ...]] = {"down_project.0.weight": (D, 2 * D), "down_project.0.bias": (D,)}
    shapes |= {f"norm_{name}.0.weight": (D,) for name in ("embed", "hidden", "postattn")}
    layer = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,), "self_attn.o_proj.weight": (D, D)}
    for name, rows in (("q", D), ("k", 16), ("v", 16)):
        layer |= {f"self_attn.{name}_proj.weight": (rows, D), f"self_attn.{name}_proj.bias": (rows,)}
    layer |= {f"mlp.{name}_proj.weight": (64, D) for name in ("gate", "up")} | {"mlp.down_proj.weight": (D, 64)}
    shapes |= {f"layers.0.0.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    weights = {f"drafter.{k}": torch.randn(s, generator=generator) / 3 + ("norm" in k) for k, s in shapes.items()}
    return weights | {"model.embed_tokens.weight": torch.zeros(3, 2), "lm_head.weight": torch.zeros(3, 2)}


def rms_norm(x_LD: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x_LD / (x_LD.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def published_forward(weights: dict[str, Tensor], embedding_VD: Tensor, row: list[int], h_LD: Tensor) -> Tensor:
    """The network as described: nothing of ours in it."""
    config = tiny_config("dream")
    config._attn_implementation = "eager"
    eps = config.rms_norm_eps
    e_LD = rms_norm(embedding_VD[row], weights["drafter.norm_embed.0.weight"], eps)
    u_LD = rms_norm(h_LD, weights["drafter.norm_hidden.0.weight"], eps)
    both_L2D = torch.cat([e_LD, u_LD], -1)
    z_LD = both_L2D @ weights["drafter.down_project.0.weight"].T + weights["drafter.down_project.0.bias"]
    layer = Qwen2DecoderLayer(config, layer_idx=0).eval()
    mine = {k.removeprefix("drafter.layers.0.0."): v for k, v in weights.items() if k.startswith("drafter.layers.0.0.")}
    layer.load_state_dict(mine)
    positions = torch.arange(len(row))[None]
    turned = Qwen2RotaryEmbedding(config=config)(z_LD[None], positions)
    everything = torch.zeros(1, 1, len(row), len(row))
    out = layer(z_LD[None], attention_mask=everything, position_ids=positions, position_embeddings=turned)
    out = out if isinstance(out, Tensor) else out[0]
    return h_LD + rms_norm(out[0], weights["drafter.norm_postattn.0.weight"], eps)


def shards(folder: Path, weights: dict[str, Tensor]) -> Path:
    """Three shards; the last one holds only the base and cannot even be read."""
    mine = [name for name in weights if name.startswith("drafter.")]
    parts = {"a.safetensors": mine[:5], "b.safetensors": mine[5:]}
    for file, names in parts.items():
        save_file({name: weights[name] for name in names}, folder / file)
    (folder / "c.safetensors").write_bytes(b"never opened")
    places = {name: file for file, names in parts.items() for name in names} | {"lm_head.weight": "c.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def as_safetensors(folder: Path, weights: dict[str, Tensor]) -> Path:
    save_file(weights, folder / "drafter.safetensors")
    return folder / "drafter.safetensors"


def as_torch(folder: Path, weights: dict[str, Tensor]) -> Path:
    torch.save(weights, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


FORMS: dict[str, Callable[[Path, dict[str, Tensor]], Path]] = {
    "safetensors": as_safetensors,
    "torch": as_torch,
    "folder": lambda folder, weights: as_torch(folder, weights).parent,
    "only file of a folder": lambda folder, weights: as_safetensors(folder, weights).parent,
    "shards": shards,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_published_network_is_ours(form: str, tmp_path: Path) -> None:
    base, weights = tiny_base("dream"), published()
    sampler = import_released(FORMS[form](tmp_path, weights), base)
    assert sampler.config == SamplerConfig(norms=True, residual=True, output_norm_init=1.0, pairing="token")
    assert not any(p.requires_grad for p in sampler.parameters()) and sampler.base_fingerprint == base.fingerprint
    state = left_pad([ROW])
    h_BLD = base.hidden(state)
    with torch.no_grad():
        ours, theirs = h_BLD, h_BLD[0]
        for _ in range(2):  # h' is the next h
            ours = sampler(ours, state)
            theirs = published_forward(weights, base.model.embed_tokens.weight, ROW, theirs)
    torch.testing.assert_close(ours[0], theirs, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        swapped = dict(weights)
        left, right = swapped["drafter.down_project.0.weight"].chunk(2, -1)
        swapped["drafter.down_project.0.weight"] = torch.cat([right, left], -1)
        wrong = published_forward(swapped, base.model.embed_tokens.weight, ROW, h_BLD[0])
    assert (wrong - sampler(h_BLD, state)[0]).abs().max() > 0.1  # the order [e, u] is seen


def test_tensors_of_the_base_are_listed_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="adjust_dlm"):
        import_released(as_safetensors(tmp_path, published()), tiny_base("dream"))
    assert "2 tensors of other parts are not read: lm_head.weight, model.embed_tokens.weight" in caplog.text


def change(weights: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    """With some tensors set (`__` is a dot), or dropped where the value is None."""
    for name, value in changes.items():
        key = "drafter." + name.replace("__", ".")
        weights.pop(key, None)
        if value is not None:
            weights[key] = value
    return weights


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"down_project__1__weight": torch.ones(D, 2 * D)}, r"do not belong .*: drafter\.down_project\.1\.weight$"),
        ({"layers__1__0__mlp__up_proj__weight": torch.ones(2)}, r"do not belong .*drafter\.layers\.1\.0\.mlp"),
        ({"layers__0__1__mlp__up_proj__weight": torch.ones(2)}, r"do not belong .*drafter\.layers\.0\.1\.mlp"),
        ({"gate__0__weight": torch.ones(2)}, r"do not belong .*: drafter\.gate\.0\.weight"),
        ({"down_project__0__bias": None}, r"lacks drafter\.down_project\.0\.bias$"),
        ({"layers__0__0__self_attn__q_proj__bias": None}, r"lacks drafter\.layers\.0\.0\.self_attn\.q_proj\.bias$"),
        ({"norm_postattn__0__weight": None}, r"lacks drafter\.norm_postattn\.0\.weight$"),
        (
            {"down_project__0__weight": torch.ones(D, 5 * D)},
            r"drafter\.down_project\.0\.weight is \(32, 160\), wanted \(32, 64\)",
        ),
        (
            {"down_project__0__bias": torch.ones(D).char()},
            r"drafter\.down_project\.0\.bias is torch\.int8; weights must",
        ),
    ],
)
def test_other_variants_and_missing_tensors_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = as_safetensors(tmp_path, change(published(), **changes))
    with pytest.raises(InputError, match=said):
        import_released(file, tiny_base("dream"))


class Evil:
    """Would run code when unpickled without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = tiny_base("dream")
    torch.save({"drafter.x": Evil()}, tmp_path / "evil.pt")
    torch.save({"state_dict": published()}, tmp_path / "nested.pt")
    (tmp_path / "cut.safetensors").write_bytes(as_safetensors(tmp_path, published()).read_bytes()[:500])
    save_file({"model.x": torch.ones(1)}, tmp_path / "base.safetensors")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"drafter.x": "../base.safetensors"}}'
    )
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "model.safetensors.index.json").write_text('{"weight_map": {"drafter.x": "q.safetensors"}}')
    for name, said in {
        "evil.pt": "cannot read the checkpoint evil.pt", "nested.pt": "no flat mapping of names to tensors",
        "cut.safetensors": "cannot read the checkpoint cut.safetensors", "none.pt": "no checkpoint at none.pt",
        "base.safetensors": r"holds no tensor called drafter\.\*; its tensors are model\.x",
        "far": r"is not an index of shards", "lost": r"not complete: q\.safetensors missing",
        ".": "must hold one checkpoint, found base.safetensors, cut",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=said):
            import_released(name, base)
    assert not (tmp_path / "evil").exists()


def test_the_command_imports_saves_and_pushes(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    registry.register_base("tiny", "a random Dream")(lambda **_: tiny_base("dream"))
    file = as_safetensors(tmp_path, published())
    argv = ["export", "--base", "tiny", "--from-released", str(file), "--output", str(tmp_path / "out")]
    assert cli.main([*argv, "--push", "me/imported", "--license", "mit"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [str(tmp_path / "out"), f"{hub.endpoint}/me/imported/commit/{1:040x}"]
    base = tiny_base("dream")
    stored = load_file(tmp_path / "out" / WEIGHTS)
    for ours, theirs in OURS_TO_THEIRS.items():
        mine = {k.removeprefix(ours + "."): v for k, v in stored.items() if k.startswith(ours + ".")}
        assert mine and all(torch.equal(v, published()[f"{theirs}.{k}"].bfloat16()) for k, v in mine.items())
    assert dataclasses.asdict(from_pretrained(tmp_path / "out", base).config)["pairing"] == "token"
    pushed = hub.repos["me/imported"][-1]
    assert {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*")} == pushed.keys()
    assert json.loads(pushed[CONFIG])["imported_from"] == "drafter.safetensors"
    assert cli.main([*argv, "--sampler", str(tmp_path)]) == 2
    assert "exclude each other" in capsys.readouterr().err
