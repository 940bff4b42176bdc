"""Short questions by chat: how many each decoder answers right, on the default model.

    python recipes/answers.py [--base DIR --sampler DIR] [--device cuda] [--temperatures 0 0.6] [--limit 107]

An answer is right if the wanted word stands in it. Joint, parallel and ADJUST decoding, the latter with the positions
of the base's pass and with those that g chooses (`candidates=0`); 24 new tokens, seed 3, one draw of each.
"""

import argparse
import calendar
import itertools
import re
import sys

from adjust_dlm import DecodeConfig, load_base, load_sampler
from adjust_dlm.decoders import decode_many

CAPITALS = """France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Greece:Athens Egypt:Cairo Japan:Tokyo
China:Beijing Russia:Moscow Poland:Warsaw Austria:Vienna Hungary:Budapest Sweden:Stockholm Norway:Oslo Finland:Helsinki
Denmark:Copenhagen Ireland:Dublin England:London Canada:Ottawa India:Delhi Thailand:Bangkok Cuba:Havana Peru:Lima
Turkey:Ankara Iran:Tehran Iraq:Baghdad Kenya:Nairobi Belgium:Brussels"""
OPPOSITES = """hot:cold big:small up:down fast:slow old:young rich:poor happy:sad light:dark wet:dry hard:soft
strong:weak early:late open:closed full:empty black:white good:bad day:night north:south high:low love:hate"""
COLORS = {
    "the sky on a clear day": "blue", "grass": "green", "a banana": "yellow", "blood": "red", "snow": "white",
    "coal": "black", "an orange": "orange", "a lemon": "yellow", "a tomato": "red", "the sea": "blue",
}  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "Monday")
MONTHS = tuple(calendar.month_name)[1:]


def questions() -> list[tuple[str, str]]:
    """Each question and the word that answers it."""
    out = [(f"What is the capital of {a}?", b) for a, b in (pair.split(":") for pair in CAPITALS.split())]
    out += [(f"What is the opposite of {a}?", b) for a, b in (pair.split(":") for pair in OPPOSITES.split())]
    out += [(f"What is {a} plus {b}?", str(a + b)) for a in (2, 3, 5, 7, 10) for b in (1, 2, 4, 6, 8, 9)]
    out += [(f"What color is {a}?", b) for a, b in COLORS.items()]
    out += [(f"Which day comes after {a}?", b) for a, b in itertools.pairwise(DAYS)]
    return out + [(f"Which month comes after {a}?", b) for a, b in itertools.pairwise(MONTHS)]


def main() -> None:
    """Prints a line for each decoder and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smol")
    parser.add_argument("--sampler")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--limit", type=int, default=107)
    args = parser.parse_args()
    base = load_base(args.base, device=args.device)
    g = load_sampler(args.sampler, base)
    asked = questions()[: args.limit]
    prompts = [base.encode_messages([{"role": "user", "content": question}]) for question, _ in asked]
    for temperature in args.temperatures:
        for decoder, k, more in (
            ("joint", 1, {}), ("parallel", 2, {}), ("parallel", 4, {}),
            *(("adjust", k, more) for more in ({}, {"candidates": 0}) for k in (2, 4, 8)),
        ):  # fmt: skip
            config = DecodeConfig(tokens_per_step=k, max_new_tokens=24, temperature=temperature, seed=3, **more)
            sampler, right = g if decoder == "adjust" else None, 0
            for numbers, result in decode_many(base, prompts, config, decoder=decoder, sampler=sampler, batch_size=256):
                for number, tokens in zip(numbers, result.tokens_BL.tolist(), strict=True):
                    text = base.tokenizer.decode(tokens[-24:], skip_special_tokens=True)
                    right += re.search(rf"\b{asked[number][1]}\b", text, re.IGNORECASE) is not None
            sys.stdout.write(f"T {temperature} {decoder} K {k} {more or ''}: {right} of {len(asked)} right\n")


if __name__ == "__main__":
    main()
