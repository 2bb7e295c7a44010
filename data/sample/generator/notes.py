"""Plain texts."""

from __future__ import annotations

from desk import Desk
from writing import PEOPLE, PLACES, clock, digits, full, money

NOTES = (
    "The ferry to the island runs on a cable. Two people can turn the wheel, but one is enough when the river is low. "
    "In spring, when snow melts upstream, the crossing takes twice as long and the operator asks cyclists to sit "
    "down. There is no timetable. A bell hangs on each bank, and whoever wants to cross rings it once.",
    "Our kiln holds sixty mugs or nine large bowls. It needs eight hours to reach the temperature of the glaze and "
    "nearly a whole day to cool. Opening it early is the mistake that everyone makes exactly once: the cold air comes "
    "in, and the bowls crack with a sound like knuckles.",
    "Field notes, north slope. The lower meadow was mown last week and smells of tea. Above the wall the grass is "
    "still standing and full of grasshoppers. Counted eleven kinds of flowers in a square of one metre by one metre; "
    "last year it was nine. The spring under the larch has moved two steps downhill.",
    "A good bicycle lock is heavy, and that is the whole problem. The light one gets carried and used; the heavy one "
    "stays at home on its hook. We therefore recommend two: a light one for the baker's, and a heavy one that lives "
    "at the station, locked to the rail, where it weighs nothing.",
    "How the library sorts its returns: picture books to the left, everything with a number on its back to the right, "
    "and in the middle the things that do not belong to us. Since January the middle has received one umbrella, four "
    "letters used as bookmarks, a pressed fern and a ticket for the opera, unused.",
    "The clock on the town hall has only an hour hand. It was built when nobody needed minutes, and when the council "
    "offered to add a second hand the town voted against it. You learn to read it: halfway between two marks means "
    "half past, and a little before a mark means that you should hurry.",
    "Instructions for the greenhouse. Open the roof when the upper thermometer passes 25 degrees and close it before "
    "the lamp in the yard comes on. Water in the morning, at the root, never on the leaves. Tomatoes lose their side "
    "shoots on Fridays. Leave the spider above the door alone; she was here first.",
    "The choir rehearses in a former swimming pool. The tiles throw every consonant back half a second later, so the "
    "conductor has them sing slowly and end each word together. Visitors say it sounds like a much larger choir. The "
    "singers say it sounds like a much wetter one.",
    "To fold the map so that it opens at the right place, begin with the long side and fold it in half, then in half "
    "again, like a letter. Then turn it and make an accordion of six. The legend should lie on top. If it does not, "
    "the map is inside out, which happens to surveyors as well.",
    "Every boat in the harbour has a rope that is too short. It is kept because it might do for something, and it "
    "gets tied to another rope that is too short, and in this manner, says the harbour master, the long ropes of the "
    "world come about. He has a drawer of labels for them and no two are alike.",
    "Report on the new oven. The left half is hotter than the right by about fifteen degrees, so trays are turned "
    "after ten minutes. Rolls need eighteen minutes, rye loaves fifty. The first batch of the day always comes out "
    "pale, because the stones are still cold inside whatever the display says.",
    "When fog comes in, the lighthouse keeper's daughter counts the seconds between the horn and its echo from the "
    "cliff. Six seconds mean that the air is dry behind the fog and it will lift by noon. Five mean nothing. She has "
    "kept a list for three years and is right more often than the radio.",
)  # fmt: skip


def note(d: Desk, number: int) -> str:
    if number < len(NOTES):
        return NOTES[number]
    day, place = d.day(2020, 2030), d.pick(PLACES)
    low, width, rain = d.between(-4, 14), d.between(3, 15), d.between(0, 30)
    sold, price = d.between(20, 140), d.pick([80, 120, 150, 250])
    return d.pick(
        [
            f"Weather diary, {place}. {full(day)}: low {digits(low)} °C, high {digits(low + width)} °C, a difference "
            f"of {width} degrees. "
            + (f"Rain: {rain} mm, which is {rain} litres on every square metre." if rain else "No rain.")
            + f" The wind turned {d.pick(['north', 'south-west', 'east'])} after {clock(d.between(40, 80) * 15)}.",
            f"Market day at {place}, {full(day)}. Sold {sold} rolls at {money(price)}: {sold} × {money(price)} = "
            f"{money(sold * price)}. "
            f"{d.pick(PEOPLE)} brought {d.between(3, 9)} crates of pears, and by {clock(d.between(40, 56) * 15)} they "
            f"were gone.",
        ]
    )
