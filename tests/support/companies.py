"""Many invented companies: a short record each, and a question that it answers."""

from __future__ import annotations

import random
from itertools import islice, product

from tests.support.records import Record

_BEGINNINGS = ("Brel", "Kras", "Dun", "Tov", "Hes", "Rov", "Zel", "Pev", "Ski", "Flo")
_MIDDLES = ("tek", "plex", "lux", "dyn", "ari", "oni", "una", "iro", "avo", "emi")
_ENDINGS = ("tech", "vex", "dale", "mark", "sun")
_KINDS = ("Shipping", "Systems", "Foundry", "Motors", "Optics", "Dairy", "Labs", "Trading")
_FIELDS = ("music", "mining", "water", "fashion", "robotics", "health", "finance", "energy")
_PRODUCTS = ("scanner", "printer", "lamp", "kettle", "drone", "camera", "heater", "compass")
_TIMES = ("autumn", "spring", "summer", "winter", "season", "year")
_PLACES = ("markets", "gardens", "schools", "shops", "trains", "roads", "halls", "offices")

MOST = len(_BEGINNINGS) * len(_MIDDLES) * len(_ENDINGS)


def companies(n: int) -> list[Record]:
    """The same ones every time, `MOST` at most. No two have the same first name, or number."""
    assert n <= MOST, n
    draw = random.Random(7)
    numbers = draw.sample(range(1001, 9999), n)
    names = [*product(_BEGINNINGS, _MIDDLES, _ENDINGS)]
    draw.shuffle(names)
    return [
        Record(
            name=f"{''.join(parts)} {draw.choice(_KINDS)}",
            workers=str(number),
            year=str(draw.randint(1850, 2020)),
            field=draw.choice(_FIELDS),
            product=f"{draw.choice(_MIDDLES).capitalize()}ra {draw.choice(_PRODUCTS)}",
            remark=f"It was a quiet {draw.choice(_TIMES)} for the {draw.choice(_PLACES)}.",
        )
        for parts, number in zip(islice(names, n), numbers, strict=True)
    ]
