"""Words for sentences, and what makes four of them hard to join.

easy: all of one everyday scene. medium: of four different scenes. hard: two of two scenes and two of two fields of
knowledge that have nothing to do with them. No word is part of another, so that each has to be written by itself.
"""

from __future__ import annotations

import random

LEVELS = ("easy", "medium", "hard")
WORDS_EACH = 4

_SCENES = """
    kitchen: soup spoon stove recipe onion butter oven dinner taste chop
    garden: flower shovel soil weed hedge bloom tomato dig fence seed
    beach: sand wave shell towel swim sunny sailboat crab shore splash
    school: pupil teacher lesson pencil homework chalk classroom spell learn desk
    farm: cow barn tractor hay milk goose plough harvest stable feed
    winter: snow mitten sledge freeze scarf icicle shiver skate frost blanket
    train: platform ticket luggage conductor whistle passenger depart rail delay window
    doctor: nurse fever medicine cough bandage clinic thermometer heal patient pulse
    music: guitar drum melody singer violin concert dance piano loud rhythm
    forest: squirrel path mushroom branch owl camp moss hike fox acorn
    shop: cashier basket coin discount customer cheap buy shelf receipt queue
    house: roof cellar chimney carpet curtain lamp paint neighbour stairs key
"""
_FIELDS = """
    astronomy: eclipse asteroid nebula telescope gravity comet
    law: verdict tribunal contract statute plaintiff testimony
    geology: sediment magma fossil quartz tectonic erosion
    computing: algorithm compiler database encryption bandwidth recursion
    philosophy: paradox virtue dogma metaphor irony dilemma
    economics: inflation monopoly dividend tariff subsidy bankruptcy
    chemistry: catalyst polymer isotope solvent enzyme alloy
    mathematics: theorem fraction polygon symmetry integer probability
"""


def _table(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(line.split(":")[1].split()) for line in text.strip().splitlines())


SCENES, FIELDS = _table(_SCENES), _table(_FIELDS)


def draw_words(rng: random.Random, level: str) -> list[str]:
    """Four words of a level, in random order."""
    if level == "easy":
        return rng.sample(rng.choice(SCENES), WORDS_EACH)
    groups = rng.sample(SCENES, 4) if level == "medium" else [*rng.sample(SCENES, 2), *rng.sample(FIELDS, 2)]
    words = [rng.choice(group) for group in groups]
    return rng.sample(words, len(words))
