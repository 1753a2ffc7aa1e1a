"""The tiny target's words: what each slot of a template may hold.

A slot's pool is a tuple of words, or of rows whose fields belong together (a country and its capital).
No word is in two pools that meet in one template, so a prompt never holds two candidates for a slot:
a small model learns to pick a word by its kind in seconds, by its place in the sentence in minutes.
"""

from __future__ import annotations

from typing import TypeAlias

Pool: TypeAlias = "tuple[str, ...] | tuple[dict[str, str], ...]"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _rows(fields: str, text: str) -> tuple[dict[str, str], ...]:
    """A lookup table from lines of `/`-separated cells; a template reads one as `{slot[field]}`."""
    names = fields.split()
    rows = (line.split("/") for line in text.strip().splitlines())
    return tuple(dict(zip(names, (cell.strip() for cell in row), strict=True)) for row in rows)


POOLS: dict[str, Pool] = {
    "name": _words("Tom Anna Ben Clara David Emma Felix Grace Hugo Kate"),
    "friend": _words("Iris Jack Noah Olga Paul Rosa Sam Vera"),
    "item": _words("apples pens books coins shells stamps eggs cards"),
    "day": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "place": _words("market library museum station garden harbor school bakery"),
    "color": _words("red blue green yellow white black"),
    "hobby": _words("chess music tennis painting cooking dancing reading hiking"),
    "topic": _words("budget design schedule contract website training"),
    "food": _words("bread cheese rice fruit soup cake"),
    "drink": _words("milk tea water juice coffee lemonade"),
    "ride": _words("bus train ferry tram"),
    "shop": _words("Luna Vega Orion Nova Atlas Delta Sol Terra"),
    "kind": _words("cafe hotel cinema theater pool clinic"),
    "var": _words("price score weight height speed width level count"),
    "hero": _words("baker sailor doctor farmer painter teacher pilot singer"),
    "mood": _words("brave quiet gentle clever lonely proud"),
    # Four ranges apart, for the same reason; short, so that every single sum turns up often.
    "small": tuple(str(n) for n in range(2, 5)),
    "middle": tuple(str(n) for n in range(6, 9)),
    "large": tuple(str(n) for n in range(10, 14)),
    "limit": tuple(str(n) for n in range(20, 100, 10)),
    "near": _rows(
        "name capital language",
        """
        France / Paris / French
        Spain / Madrid / Spanish
        Italy / Rome / Italian
        Germany / Berlin / German
        Greece / Athens / Greek
        Poland / Warsaw / Polish
        Norway / Oslo / Norwegian
        Hungary / Budapest / Hungarian
        """,
    ),
    "far": _rows(
        "name capital language",
        """
        Japan / Tokyo / Japanese
        China / Beijing / Chinese
        Korea / Seoul / Korean
        Egypt / Cairo / Arabic
        Kenya / Nairobi / Swahili
        Thailand / Bangkok / Thai
        Nepal / Kathmandu / Nepali
        Brazil / Brasilia / Portuguese
        """,
    ),
    "who": _rows(
        "en fr",
        """
        cat / le chat
        dog / le chien
        duck / le canard
        king / le roi
        horse / le cheval
        girl / la fille
        """,
    ),
    "what": _rows(
        "en fr",
        """
        house / la maison
        car / la voiture
        flower / la fleur
        table / la table
        book / le livre
        garden / le jardin
        """,
    ),
    "trait": _rows(
        "en fr",
        """
        red / rouge
        sad / triste
        young / jeune
        fast / rapide
        """,
    ),
    "verb": _rows(
        "en fr",
        """
        sees / voit
        watches / regarde
        likes / aime
        finds / trouve
        follows / suit
        """,
    ),
    "time": _rows(
        "en fr",
        """
        in the morning / le matin
        in the evening / le soir
        at night / la nuit
        in winter / en hiver
        """,
    ),
    "scene": _rows(
        "at rhyme",
        """
        sea / and nobody else is as happy as she
        hill / and all of the valley is silent and still
        moon / and dreams of a song that is coming back soon
        snow / and hums to the lantern a melody low
        tree / and shares with the sparrows a biscuit and tea
        rain / and waits for the light of the very last train
        """,
    ),
}
