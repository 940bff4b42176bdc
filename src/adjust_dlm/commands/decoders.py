"""`adjust decoders`: every decoder in a line, with its settings, what it needs, and whether a server offers it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from adjust_dlm.commands.bases import ListConfig
from adjust_dlm.commands.common import DrawFlags
from adjust_dlm.commands.output import Outcome, say, show_table, to_json


def run(flags: ListConfig) -> Outcome:
    """Lists them; loads no model."""
    results = {"decoders": listed()}
    if flags.json:
        say(to_json(results))
    else:
        rows = [
            (line["decoder"], line["what it does"], " ".join(f"{k}={v}" for k, v in line["settings"].items()),
             line["needs"], "yes" if line["served"] else "no")
            for line in results["decoders"]
        ]  # fmt: skip
        show_table(["decoder", "what it does", "settings", "needs", "served"], rows)
        say("Settings of a decoder are given as --set NAME=VALUE, or in a variant: adjust:candidates=0.")
    return Outcome(results=results)


def listed() -> list[dict[str, Any]]:
    """Name, first sentence of the module, settings with defaults, what is needed, and whether it is served."""
    import importlib

    from adjust_dlm.decoders import DECODERS  # with their functions, and so with torch

    lines = []
    for name, entry in DECODERS.items():
        doc = importlib.import_module(entry.run.__module__).__doc__ or ""
        settings: dict[str, Any] = {"tokens_per_step": DrawFlags.tokens_per_step} if entry.takes_k else {}
        for field in fields(entry.options) if entry.options else ():  # type: ignore[arg-type]
            settings[field.name] = None if field.default is MISSING else field.default
        needs = [word for word, needed in (("g", entry.needs_sampler), ("AR model", entry.needs_partner)) if needed]
        lines.append(
            {"decoder": name, "what it does": doc.split("\n\n")[0].replace("\n", " "), "settings": settings,
             "needs": ", ".join(needs), "served": entry.resumable}
        )  # fmt: skip
    return lines
