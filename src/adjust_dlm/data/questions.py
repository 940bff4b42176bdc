"""Short questions with a known answer, such as "What is the capital of France?", for corpora and for evaluation.

A fact is held out or not by what it is about: a country, a word, a pair of numbers, whatever the question. No question
of the training stream names a held-out one, not even as its answer. Facts and wording are this project's own.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

HELD_OUT_EVERY = 3  # one in so many countries, words and pairs of numbers
MOST = 20  # the largest number of a pair

_CAPITALS = """
    Afghanistan:Kabul Albania:Tirana Algeria:Algiers Angola:Luanda Argentina:Buenos_Aires Armenia:Yerevan
    Australia:Canberra Austria:Vienna Azerbaijan:Baku Bahrain:Manama Bangladesh:Dhaka Belarus:Minsk Belgium:Brussels
    Bhutan:Thimphu Bolivia:Sucre|La_Paz Botswana:Gaborone Brazil:Brasilia|Bras\u00edlia Bulgaria:Sofia
    Cambodia:Phnom_Penh Cameroon:Yaounde|Yaound\u00e9 Canada:Ottawa Chad:N'Djamena Chile:Santiago China:Beijing
    Colombia:Bogota|Bogot\u00e1 Croatia:Zagreb Cuba:Havana Cyprus:Nicosia Denmark:Copenhagen Ecuador:Quito Egypt:Cairo
    Eritrea:Asmara Estonia:Tallinn Ethiopia:Addis_Ababa Fiji:Suva Finland:Helsinki France:Paris Gabon:Libreville
    Georgia:Tbilisi Germany:Berlin Ghana:Accra Greece:Athens Haiti:Port-au-Prince Honduras:Tegucigalpa Hungary:Budapest
    Iceland:Reykjavik India:New_Delhi|Delhi Indonesia:Jakarta Iran:Tehran Iraq:Baghdad Ireland:Dublin Israel:Jerusalem
    Italy:Rome Jamaica:Kingston Japan:Tokyo Jordan:Amman Kazakhstan:Astana|Nur-Sultan Kenya:Nairobi Kuwait:Kuwait_City
    Laos:Vientiane Latvia:Riga Lebanon:Beirut Liberia:Monrovia Libya:Tripoli Lithuania:Vilnius Madagascar:Antananarivo
    Malawi:Lilongwe Malaysia:Kuala_Lumpur Mali:Bamako Malta:Valletta Mexico:Mexico_City Mongolia:Ulaanbaatar|Ulan_Bator
    Morocco:Rabat Mozambique:Maputo Namibia:Windhoek Nepal:Kathmandu Nicaragua:Managua Niger:Niamey Nigeria:Abuja
    Norway:Oslo Oman:Muscat Pakistan:Islamabad Panama:Panama_City Paraguay:Asuncion|Asunci\u00f3n Peru:Lima
    Philippines:Manila Poland:Warsaw Portugal:Lisbon Qatar:Doha Romania:Bucharest Russia:Moscow Rwanda:Kigali
    Senegal:Dakar Serbia:Belgrade Slovakia:Bratislava Slovenia:Ljubljana Somalia:Mogadishu Spain:Madrid Sudan:Khartoum
    Sweden:Stockholm Switzerland:Bern Syria:Damascus Tanzania:Dodoma Thailand:Bangkok Tunisia:Tunis Turkey:Ankara
    Uganda:Kampala Ukraine:Kyiv|Kiev Uruguay:Montevideo Uzbekistan:Tashkent Venezuela:Caracas Vietnam:Hanoi
    Yemen:Sanaa|Sana'a Zambia:Lusaka Zimbabwe:Harare
"""
_CONTINENTS = {
    "Africa": """Algeria Angola Botswana Cameroon Chad Egypt Eritrea Ethiopia Gabon Ghana Kenya Liberia Libya Madagascar
        Malawi Mali Morocco Mozambique Namibia Niger Nigeria Rwanda Senegal Somalia Sudan Tanzania Tunisia Uganda Zambia
        Zimbabwe""",
    "Asia": """Afghanistan Bahrain Bangladesh Bhutan Cambodia China India Indonesia Iran Iraq Israel Japan Jordan Kuwait
        Laos Lebanon Malaysia Mongolia Nepal Oman Pakistan Philippines Qatar Syria Thailand Uzbekistan Vietnam Yemen""",
    "Europe": """Albania Austria Belarus Belgium Bulgaria Croatia Denmark Estonia Finland France Germany Greece Hungary
        Iceland Ireland Italy Latvia Lithuania Malta Norway Poland Portugal Romania Serbia Slovakia Slovenia Spain
        Sweden Switzerland Ukraine""",
    "South America": "Argentina Bolivia Brazil Chile Colombia Ecuador Paraguay Peru Uruguay Venezuela",
    "North America": "Canada Mexico Cuba Jamaica Haiti Honduras Nicaragua Panama",
}
_LANGUAGES = """
    Austria:German Brazil:Portuguese Bulgaria:Bulgarian Chile:Spanish China:Chinese|Mandarin Croatia:Croatian
    Cuba:Spanish Denmark:Danish Egypt:Arabic Estonia:Estonian Finland:Finnish France:French Germany:German Greece:Greek
    Hungary:Hungarian Iceland:Icelandic Iran:Persian|Farsi Iraq:Arabic Israel:Hebrew Italy:Italian Japan:Japanese
    Laos:Lao Latvia:Latvian Lithuania:Lithuanian Mexico:Spanish Mongolia:Mongolian Nepal:Nepali Norway:Norwegian
    Poland:Polish Portugal:Portuguese Romania:Romanian Russia:Russian Serbia:Serbian Slovakia:Slovak
    Slovenia:Slovene|Slovenian Spain:Spanish Sweden:Swedish Thailand:Thai Turkey:Turkish Ukraine:Ukrainian
    Vietnam:Vietnamese
"""
_OPPOSITES = """
    hot:cold big:small|little up:down fast:slow old:new|young rich:poor happy:sad|unhappy light:dark|heavy wet:dry
    hard:soft|easy strong:weak early:late open:closed|close|shut full:empty black:white good:bad|evil day:night
    north:south east:west high:low love:hate true:false left:right long:short wide:narrow thick:thin deep:shallow
    clean:dirty loud:quiet brave:cowardly|afraid|timid sweet:sour|bitter begin:end|finish buy:sell come:go give:take
    win:lose start:stop|finish|end push:pull laugh:cry live:die rise:fall|set|sink remember:forget accept:reject|refuse
    arrive:depart|leave attack:defend always:never all:none before:after above:below inside:outside near:far first:last
    front:back top:bottom male:female alive:dead awake:asleep rough:smooth sharp:dull|blunt tight:loose noisy:quiet
    cheap:expensive safe:dangerous simple:complex|complicated ancient:modern absent:present beautiful:ugly
    bright:dull|dim|dark guilty:innocent heavy:light polite:rude|impolite public:private success:failure victory:defeat
    war:peace friend:enemy|foe question:answer summer:winter heaven:hell minimum:maximum positive:negative hero:villain
    future:past increase:decrease freedom:slavery|captivity|imprisonment entrance:exit import:export add:subtract
    multiply:divide create:destroy find:lose ask:answer sink:float borrow:lend build:destroy|demolish
    generous:selfish|stingy|greedy lazy:hardworking|industrious|active optimistic:pessimistic wise:foolish
    visible:invisible possible:impossible legal:illegal honest:dishonest patient:impatient regular:irregular
    perfect:imperfect correct:incorrect|wrong active:passive|inactive temporary:permanent artificial:natural
"""
_SYNONYMS = """
    big:large|huge|enormous|great|massive|giant small:tiny|little|miniature|petite
    happy:glad|joyful|cheerful|content|pleased|delighted sad:unhappy|sorrowful|gloomy|melancholy
    fast:quick|rapid|swift|speedy smart:intelligent|clever|bright|brilliant angry:furious|mad|irate|enraged|upset
    begin:start|commence|initiate end:finish|conclude|conclusion|stop
    beautiful:pretty|lovely|gorgeous|attractive|stunning brave:courageous|bold|fearless|valiant
    rich:wealthy|affluent|prosperous quiet:silent|calm|peaceful|still hard:difficult|tough|challenging
    easy:simple|effortless afraid:scared|frightened|fearful tired:exhausted|weary|fatigued
    funny:humorous|amusing|hilarious|comical strange:odd|weird|unusual|peculiar answer:reply|response
    help:assist|aid|support buy:purchase|acquire choose:select|pick look:see|gaze|watch|view|glance
    speak:talk|say|communicate important:significant|crucial|vital|essential
    delicious:tasty|yummy|scrumptious|delectable dangerous:risky|hazardous|perilous|unsafe
    kind:nice|gentle|caring|compassionate|friendly lucky:fortunate|blessed cold:chilly|freezing|frigid|icy
    hot:warm|burning|scorching|boiling job:work|occupation|employment|profession house:home|residence|dwelling
    road:street|path|highway child:kid|youngster friend:companion|buddy|pal|mate error:mistake
    idea:thought|concept|notion gift:present journey:trip|voyage|travel|expedition woods:forest ocean:sea stone:rock
    sick:ill|unwell ancient:old|antique|archaic correct:right|accurate|true false:untrue|wrong|incorrect
    huge:enormous|giant|gigantic|massive|large|big terrible:awful|horrible|dreadful
    wonderful:amazing|fantastic|marvelous|great repair:fix|mend jump:leap|hop shout:yell|scream cry:weep|sob
    hide:conceal shut:close destroy:ruin|demolish gather:collect|assemble|accumulate allow:permit|let|enable
    build:construct|create|make
"""
_COLORS = """
    grass:green a_banana:yellow blood:red snow:white coal:black an_orange:orange a_lemon:yellow a_ripe_tomato:red
    the_sun:yellow|white a_strawberry:red a_carrot:orange milk:white chocolate:brown spinach:green a_cucumber:green
    an_elephant:gray|grey a_polar_bear:white a_frog:green a_flamingo:pink a_crow:black|blue_and_black a_swan:white
    a_pumpkin:orange a_cherry:red an_emerald:green a_ruby:red a_sapphire:blue gold:gold|yellow silver:silver
    a_fire_truck:red a_taxi:yellow the_ocean:blue the_sky:blue a_rose:red a_daffodil:yellow a_sunflower:yellow
    broccoli:green lettuce:green an_eggplant:purple salt:white rice:white cotton:white charcoal:black a_lime:green
    a_pea:green butter:yellow a_canary:yellow lavender:purple ketchup:red mustard:yellow a_stop_sign:red a_leaf:green
    a_blueberry:blue a_raven:black a_panda:black_and_white a_zebra:black_and_white
"""
_YOUNG = """
    dog:puppy|pup cat:kitten cow:calf horse:foal sheep:lamb pig:piglet goat:kid duck:duckling goose:gosling hen:chick
    lion:cub bear:cub frog:tadpole kangaroo:joey deer:fawn swan:cygnet owl:owlet elephant:calf whale:calf wolf:pup|cub
    tiger:cub fox:kit|cub|pup rabbit:kit|bunny|kitten eagle:eaglet butterfly:caterpillar|larva
"""
_PLURALS = """
    child:children man:men woman:women mouse:mice foot:feet tooth:teeth goose:geese person:people ox:oxen leaf:leaves
    knife:knives wolf:wolves life:lives wife:wives half:halves loaf:loaves thief:thieves shelf:shelves city:cities
    baby:babies story:stories party:parties country:countries box:boxes bus:buses dish:dishes church:churches fox:foxes
    potato:potatoes tomato:tomatoes hero:heroes sheep:sheep deer:deer fish:fish cactus:cacti|cactuses watch:watches
    glass:glasses class:classes wish:wishes bench:benches lady:ladies fly:flies cherry:cherries family:families
    army:armies library:libraries berry:berries penny:pennies pony:ponies echo:echoes volcano:volcanoes
"""
_REGULAR = """
    book dog cat car house tree apple day key toy boy girl table chair river mountain bird flower teacher student
    doctor window door road bridge ship train plane letter number picture song game school garden farmer lake star
    cloud shoe hat shirt coat cup plate spoon fork bottle lamp clock pen pencil paper desk wall floor roof field island
    street village king queen soldier horse cow pig hen duck rabbit lion tiger bear monkey snake frog banana orange
    lemon carrot onion bean seed root branch wheel engine hammer nail rope bell drum piano guitar photo radio robot
    planet
"""
_PAST = """
    go:went see:saw eat:ate run:ran take:took give:gave come:came make:made write:wrote speak:spoke drink:drank
    sing:sang swim:swam begin:began break:broke bring:brought buy:bought catch:caught choose:chose do:did draw:drew
    drive:drove fall:fell feel:felt find:found fly:flew forget:forgot get:got grow:grew have:had hear:heard hold:held
    keep:kept know:knew leave:left lose:lost meet:met pay:paid read:read ride:rode rise:rose say:said sell:sold
    send:sent sit:sat sleep:slept stand:stood steal:stole teach:taught tell:told think:thought throw:threw
    understand:understood wake:woke wear:wore win:won walk:walked talk:talked play:played jump:jumped
"""
_SYMBOLS = """
    hydrogen:H helium:He carbon:C nitrogen:N oxygen:O sodium:Na magnesium:Mg aluminum:Al silicon:Si phosphorus:P
    sulfur:S chlorine:Cl potassium:K calcium:Ca iron:Fe copper:Cu zinc:Zn silver:Ag gold:Au lead:Pb mercury:Hg tin:Sn
    neon:Ne lithium:Li
"""
_COUNTS = """
    days_in_a_week:7|seven months_in_a_year:12|twelve hours_in_a_day:24 minutes_in_an_hour:60|sixty
    seconds_in_a_minute:60|sixty legs_on_a_spider:8|eight legs_on_a_dog:4|four legs_on_an_insect:6|six
    sides_in_a_triangle:3|three sides_in_a_square:4|four sides_in_a_hexagon:6|six sides_in_a_pentagon:5|five
    sides_in_an_octagon:8|eight wheels_on_a_bicycle:2|two wheels_on_a_car:4|four letters_in_the_English_alphabet:26
    days_in_a_leap_year:366 weeks_in_a_year:52 planets_in_our_solar_system:8|eight colors_in_a_rainbow:7|seven
    continents_on_Earth:7|seven cents_in_a_dollar:100 years_in_a_century:100 years_in_a_decade:10|ten
    centimeters_in_a_meter:100 grams_in_a_kilogram:1000|1,000 meters_in_a_kilometer:1000|1,000 inches_in_a_foot:12
    feet_in_a_yard:3|three players_on_a_soccer_team:11|eleven strings_on_a_guitar:6|six eggs_in_a_dozen:12|twelve
    fingers_on_one_hand:5|five arms_on_an_octopus:8|eight states_in_the_United_States:50
"""
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip

WORDING: dict[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {}?", "Name the capital of {}.", "What's the capital city of {}?",
        "Which city is the capital of {}?", "Tell me the capital of {}.", "Capital of {}?",
    ),
    "continent": ("Which continent is {} in?", "On which continent is {}?", "What continent is {} part of?"),
    "language": (
        "What language is spoken in {}?", "What is the official language of {}?",
        "Which language do people speak in {}?",
    ),
    "opposite": (
        "What is the opposite of {}?", 'What is the opposite of "{}"?', "Give me an antonym of {}.",
        "What word means the opposite of {}?", "Opposite of {}?",
    ),
    "synonym": (
        "What is a synonym for {}?", 'Give me a synonym of "{}".', "What is another word for {}?",
        "Name a word that means the same as {}.",
    ),
    "color": ("What color is {}?", "What is the color of {}?", "Which color does {} have?", "Tell me the color of {}."),
    "young": ("What is a baby {} called?", "What do you call a young {}?", "What is the name of a baby {}?"),
    "plural": ("What is the plural of {}?", 'What is the plural of "{}"?', "Give me the plural form of {}."),
    "past": (
        "What is the past tense of {}?", 'What is the past tense of "{}"?', "Give me the past tense of the verb {}.",
    ),
    "symbol": ("What is the chemical symbol for {}?", "What is the symbol of the element {}?"),
    "count": ("How many {}?", "Tell me how many {}."),
    "plus": ("What is {} plus {}?", "What is {} + {}?", "{} + {} = ?", "Add {} and {}.", "How much is {} plus {}?"),
    "minus": ("What is {} minus {}?", "What is {} - {}?", "{} - {} = ?", "How much is {} minus {}?"),
    "times": ("What is {} times {}?", "What is {} x {}?", "Multiply {} by {}.", "How much is {} times {}?"),
    "day after": ("Which day comes after {}?", "What day is it after {}?", "What is the day after {}?"),
    "day before": ("Which day comes before {}?", "What is the day before {}?"),
    "month after": ("Which month comes after {}?", "What is the month after {}?", "What month follows {}?"),
    "month before": ("Which month comes before {}?", "What is the month before {}?"),
}  # fmt: skip
_SPOKEN = frozenset(re.findall(r"[\w'-]+", " ".join(itertools.chain(*WORDING.values())).lower()))
_NAMED = frozenset({"capital", "continent", "language"})  # a country's name is enough to ask about it
_ASKS = re.compile(
    r"opposite|contrary|antonym|synonym|another word|(same|similar) (thing )?(as|in meaning|to)|mean(s|ing)? the same"
    r"|colou?r|hue|baby|babies|young|plural|singular|past (tense|form|participle)|symbol|after|before|follow|precede"
    r"|tomorrow|yesterday|next",
    re.IGNORECASE,
)
_COUNTS_SOMETHING = re.compile(r"how many|number of|count", re.IGNORECASE)
_FILLING = {"a", "an", "the", "in", "on", "one", "our", "earth", "united"}  # not in "how many continents are there?"
_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_NUMBER = re.compile(rf"\b({'|'.join(_NUMBERS)})\b", re.IGNORECASE)
_REACHES = re.compile(  # a number, perhaps its unit, what is done with it, a number
    r"\d\s*[-+*/x\u00d7\u00f7\u2212\u2013]\s*\d"
    r"|\d\W*([a-z]+\W+){0,2}?(plus|minus|times|and|by|from|to|over|less)\W*\d"
    r"|\b(add|sum|subtract|difference|multipl|product|divid|total)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Fact:
    """One thing that can be asked.

    Attributes:
        kind: a key of `WORDING`.
        asked: what the wording is filled with.
        answers: one of these words stands in a right answer.
        about: the country, words or pair of numbers (`3 5`) that the question and its answers name.
    """

    kind: str
    asked: tuple[str, ...]
    answers: tuple[str, ...]
    about: tuple[str, ...]

    def is_held_out(self) -> bool:
        """Whether what is asked about is held out."""
        return is_held_out(self.about[0])

    def is_clean(self) -> bool:
        """Whether neither question nor answers name anything that is held out."""
        countries, others, _ = _held_out_names()
        answered = (answer.lower() in countries | others for answer in self.answers)
        return not any(map(is_held_out, self.about)) and not any(answered)

    def wordings(self) -> list[str]:
        """The question in every wording."""
        return [wording.format(*self.asked) for wording in WORDING[self.kind]]

    def right(self, reply: str) -> bool:
        """Whether one of the answers stands in the reply as a word."""
        case = 0 if self.kind == "symbol" else re.IGNORECASE
        return any(re.search(rf"(?<!\w){re.escape(a)}(?!\w)", reply, case) for a in self.answers)


def is_held_out(name: str) -> bool:
    """Whether a country, a word or a pair of numbers is kept for evaluation; words of the wordings are not."""
    if name.lower() in _SPOKEN:
        return False
    digest = hashlib.blake2b(name.lower().encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_EVERY == 0


@cache
def facts() -> tuple[Fact, ...]:
    """All facts."""
    out = []
    for kind, table in (
        ("capital", _CAPITALS), ("language", _LANGUAGES), ("opposite", _OPPOSITES), ("synonym", _SYNONYMS),
        ("color", _COLORS), ("young", _YOUNG), ("plural", _PLURALS), ("past", _PAST), ("symbol", _SYMBOLS),
        ("count", _COUNTS),
    ):  # fmt: skip
        for entry in table.replace("\n", " ").split():
            asked, _, found = entry.replace("_", " ").partition(":")
            answers = tuple(found.split("|"))
            thing = asked.split()[-1] if kind == "color" else asked  # a banana: whatever is asked about bananas
            about = (thing, *answers) if kind in ("opposite", "synonym") else (thing,)
            out.append(Fact(kind, (asked,), answers, about))
    out += [Fact("plural", (w,), (_plural(w),), (w,)) for w in _REGULAR.split()]
    for continent, table in _CONTINENTS.items():
        out += [Fact("continent", (name,), (continent,), (name,)) for name in table.split()]
    for a, b in itertools.product(range(1, MOST + 1), repeat=2):
        pair = f"{min(a, b)} {max(a, b)}"
        out.append(Fact("plus", (str(a), str(b)), (str(a + b),), (pair,)))
        if a > b and a != 2 * b:  # the answer is never one of the numbers that are asked
            out.append(Fact("minus", (str(a), str(b)), (str(a - b),), (pair,)))
        if min(a, b) >= 2 and max(a, b) <= 12:
            out.append(Fact("times", (str(a), str(b)), (str(a * b),), (pair,)))
    for name, ring in (("day", _DAYS), ("month", _MONTHS)):
        for early, late in zip(ring, ring[1:] + ring[:1], strict=True):
            out.append(Fact(f"{name} after", (early,), (late,), (early,)))
            out.append(Fact(f"{name} before", (late,), (early,), (late,)))
    return tuple(out)


def _plural(word: str) -> str:
    return word + ("es" if word.endswith(("ch", "sh", "s", "x")) else "s")


def questions(seed: int, *, held_out: bool = False) -> Iterator[tuple[str, Fact]]:
    """An endless, reproducible stream of questions in any wording, all kinds equally often on average.

    Args:
        seed: names the stream.
        held_out: ask for held-out facts; without it no question or answer names one.
    """
    rng = random.Random(f"questions {seed} {held_out}")
    wanted = Fact.is_held_out if held_out else Fact.is_clean
    by_kind = {kind: [f for f in facts() if f.kind == kind and wanted(f)] for kind in WORDING}
    kinds = [kind for kind, found in by_kind.items() if found]
    while True:
        fact = rng.choice(by_kind[rng.choice(kinds)])
        yield rng.choice(fact.wordings()), fact


def asks_held_out(text: str) -> bool:
    """Whether a user's turn may ask for a held-out fact: it names the country, or asks about the word or the pair.

    "Japan's" and "Japanese" name Japan, "bananas" a banana, and "three plus five" is a pair.
    """
    words = {form for word in re.findall(r"[^\W_]+", text.lower()) for form in _singulars(word)}
    countries, others, counted = _held_out_names()
    if any(word.startswith(tuple(countries)) for word in words) or (_ASKS.search(text) and words & others):
        return True
    if _COUNTS_SOMETHING.search(text) and any(words >= things for things in counted):
        return True
    text = _NUMBER.sub(lambda found: str(_NUMBERS.index(found[0].lower())), text)
    numbers = [int(number) for number in re.findall(r"(?<!\d)\d{1,2}(?!\d)", text)]
    pairs = itertools.combinations(sorted(number for number in numbers if number <= MOST), 2)
    return bool(_REACHES.search(text)) and any(is_held_out(f"{a} {b}") for a, b in pairs)


def _singulars(word: str) -> set[str]:
    """The word, and what it may be the plural of."""
    return {word, _irregular().get(word, word), word.removesuffix("s"), word.removesuffix("es")} | (
        {word[:-3] + "y"} if word.endswith("ies") else set()
    )


@cache
def _irregular() -> dict[str, str]:
    """Plural -> singular."""
    return {answer: fact.asked[0] for fact in facts() if fact.kind == "plural" for answer in fact.answers}


@cache
def _held_out_names() -> tuple[frozenset[str], frozenset[str], tuple[frozenset[str], ...]]:
    """Held-out countries, words, and of things to count the words, in lower case and the singular."""
    countries: set[str] = set()
    others: set[str] = set()
    counted = []
    for fact in facts():
        name = fact.about[0].lower()
        if fact.kind in ("plus", "minus", "times") or not fact.is_held_out():
            continue
        if fact.kind == "count":
            told = [word for word in name.split() if word not in _FILLING]
            counted.append(frozenset(_irregular().get(word, word.removesuffix("s")) for word in told))
        else:
            (countries if fact.kind in _NAMED else others).add(name)
    return frozenset(countries), frozenset(others), tuple(counted)
