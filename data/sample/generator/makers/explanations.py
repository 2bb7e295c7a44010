"""Makers that explain a concept."""

from __future__ import annotations

from typing import NamedTuple

from desk import Desk, Dialogue
from writing import asked


class Concept(NamedTuple):
    topic: str
    gist: str
    text: str
    ask: str
    answer: str


CONCEPTS = (
    Concept("why the sea has tides",
            "The Moon pulls harder on the near side of the Earth than on the far side, and the water follows.",
            "The Moon pulls on every part of the Earth, but a little more on the side that faces it and a little less "
            "on the side that faces away. "
            "The difference stretches the oceans into two shallow bulges. The Earth turns underneath them, so a "
            "harbour passes through high water about twice a day. "
            "Because the Moon moves on in the meantime, the times slip by some fifty minutes from one day to the "
            "next. Coasts and sea beds shape the rest: a funnel-shaped bay can raise the water by several metres, a "
            "closed sea hardly at all.",
            "Does the Sun play a part too?",
            "Yes, a bit less than half as strongly. At new and full moon Sun and Moon pull along one line and the "
            "tides are large; at half moon they work against each other and the tides are small."),
    Concept("how a hash table finds things so fast",
            "It computes from the key where the value must lie, instead of searching for it.",
            "A hash table keeps its entries in numbered slots. A hash function turns each key into a number, and the "
            "number picks the slot. To look something up, compute the same number again and go straight there; the "
            "size of the table does not matter. "
            "Two keys may want the same slot. Then the table keeps both, in a short list or in the next free slot, "
            "and compares the keys themselves. As long as there is room to spare such collisions are rare, so tables "
            "grow before they are full.",
            "What makes a hash function good?",
            "It spreads keys evenly over the slots, it is quick to compute, and small changes of the key change the "
            "result thoroughly. If outsiders choose the keys, it should also be seeded secretly, so that nobody can "
            "make everything collide on purpose."),
    Concept("what compound interest is",
            "Interest that earns interest itself, because it stays in the account.",
            "With simple interest, only the first deposit earns anything, and the balance climbs by the same amount "
            "every year. With compound interest, each year's interest is added to the balance and earns interest from "
            "then on. "
            "At first the two look alike. The difference is that one grows in a straight line and the other along a "
            "curve that gets steeper. A handy rule: divide 72 by the rate in percent, and you have roughly the number "
            "of years in which the money doubles.",
            "How good is the rule with 72?",
            "Quite good for rates between about 4 and 12 percent. At 6 percent it says 12 years; the exact figure is "
            "about 11.9."),
    Concept("why the sky is blue",
            "Air scatters short, blue waves of sunlight much more than long, red ones.",
            "Sunlight contains all colours. On its way through the air it meets molecules far smaller than its "
            "wavelength, and these scatter light of short wavelength much more strongly: halve the wavelength and "
            "sixteen times as much is scattered. "
            "So blue light reaches the eye from every direction of the sky, while the other colours mostly pass "
            "straight through. Near sunset the light has crossed so much air that the blue has been scattered out of "
            "the beam, and what arrives is orange and red.",
            "Then why is the sky not violet?",
            "Violet is scattered even more, but there is less of it in sunlight, some is absorbed high up, and our "
            "eyes are less sensitive to it. The mixture that remains looks blue."),
    Concept("what a prime number is",
            "A whole number above one that only one and itself divide evenly.",
            "Some numbers can be laid out as a rectangle of stones with more than one row: twelve stones make three "
            "rows of four. Others cannot; seven stones make only a single line. Numbers of this second kind are "
            "called primes. "
            "Every whole number above one is a product of primes in exactly one way, apart from the order, so the "
            "primes are the building blocks of multiplication. There is no largest: multiply any list of primes, add "
            "one, and the result has a prime factor that is not in the list.",
            "Why does 1 not count?",
            "Because the factorisation would no longer be unique. If 1 were prime, six could be written with no ones, "
            "with one of them or with a thousand, and every theorem would need an exception."),
    Concept("how vaccination protects us",
            "It shows the immune system a harmless likeness of a germ, so that the defence is ready before the germ "
            "comes.",
            "When a germ enters the body for the first time, the immune system needs days to find cells that fit it "
            "and to multiply them. A vaccine brings only a marker of the germ, or a germ that is dead or weakened, so "
            "the search happens without the illness. "
            "Some of the selected cells stay for years as a memory. When the real germ turns up, they answer within "
            "hours, often before anything is felt. If enough people are protected, the germ runs out of hosts, which "
            "shelters those who cannot be vaccinated.",
            "Why do some need a booster?",
            "Memory fades at different speeds, and some germs change their surface. A booster renews the memory or "
            "updates it."),
    Concept("what version control is good for",
            "It remembers every state of a project, who changed what, and why.",
            "Version control records a project as a chain of snapshots. Each one has an author, a date and a message, "
            "and can be compared with any other. You can try something out on a branch and throw it away, find the "
            "change that broke a test by halving the history, or work on the same file as a colleague and merge both "
            "versions. "
            "It works best when each snapshot holds one idea and its message says why it was needed, because the "
            "difference itself shows only what was done.",
            "What should not go into it?",
            "Passwords and keys, because history keeps them for ever; large files that can be rebuilt; and anything "
            "that only makes sense on your own machine."),
    Concept("how bread rises",
            "Yeast eats sugar and gives off gas, and the stretchy dough holds the bubbles.",
            "Flour and water make gluten, a net of proteins that kneading stretches and lines up. Yeast feeds on "
            "sugars that enzymes release from the starch and gives off carbon dioxide. The net catches the gas in "
            "many small bubbles, and the dough swells. "
            "Warmth speeds everything up; a night in the cold slows it down and leaves time for flavour. In the oven "
            "the bubbles expand once more, the yeast dies at about 60 °C, and the net sets firm.",
            "Can one let it rise too long?",
            "Yes. The net becomes too thin to hold the gas, the dough collapses, and the loaf comes out flat and "
            "dense."),
    Concept("the difference between weather and climate",
            "Weather is what happens today; climate is what usually happens, over decades.",
            "Weather is the state of the air at one place and time: the shower this afternoon, the frost tonight. "
            "Climate is the statistics of weather over a long period, by convention thirty years: how warm July "
            "usually is, how often it snows, how far it strays from the usual. "
            "A single cold day says nothing about climate, just as one throw says nothing about a die. But if sixes "
            "keep getting more frequent over hundreds of throws, the die has changed.",
            "Why can we forecast climate if not next month's weather?",
            "Because they are different questions. Nobody knows which throws will be sixes, but the share of sixes "
            "follows from the shape of the die; in the same way averages follow from sunlight, air and oceans even "
            "though single days stay unpredictable."),
    Concept("what recursion means in programming",
            "A function solves a problem by calling itself on a smaller piece of it.",
            "A recursive function has two parts: a case so simple that the answer is known, and a rule that reduces "
            "every other case to a simpler one. To count the files in a folder, count those that lie in it directly "
            "and add, for every folder inside, the answer of the same function. "
            "Each call waits until the calls it made have returned, and the computer keeps the waiting ones on a "
            "stack. If the simple case is never reached, the stack runs full and the program stops with an error.",
            "When is a loop better?",
            "When the problem is a plain sequence, or the depth may be large. Recursion shines where the data "
            "branches: trees, nested lists, grammars."),
    Concept("how a lever works",
            "A long path with little force does the same work as a short path with much force.",
            "A lever is a rigid bar that turns about a fixed point. Push the far end down and the near end rises, "
            "less far but with more force. The rule is that force times distance from the pivot is the same on both "
            "sides: three times the distance, a third of the force. "
            "Nothing is gained for free. The hand that pushes with a third of the force has to move three times as "
            "far. Scissors, wheelbarrows, oars and door handles are all levers; they differ only in where the pivot "
            "sits.",
            "Where is the pivot of a wheelbarrow?",
            "At the axle of the wheel. The load lies between the pivot and your hands, so your hands always carry "
            "less than the full weight."),
    Concept("what inflation is",
            "A general rise of prices, so that the same money buys less.",
            "Prices change all the time: tomatoes get cheaper in summer, computers from year to year. Inflation means "
            "that prices rise on the whole. To measure it, statisticians price a basket of things that households "
            "typically buy and see how much more the same basket costs a year later. "
            "Slow inflation is easy to live with, because wages and contracts adapt. Fast inflation makes saving "
            "pointless and planning hard. Falling prices are no blessing either: who expects them puts off buying, "
            "and shops and workshops stand idle.",
            "Who gains from inflation?",
            "People with debts at a fixed rate, because they pay back money that is worth less. Savers and those on "
            "fixed incomes lose."),
    Concept("why we have time zones",
            "So that noon is near the middle of the day everywhere, although the Earth turns.",
            "The Sun stands highest at different moments in different places; every degree to the west delays noon by "
            "four minutes. As long as people travelled on foot, each town kept its own time. Railways made that "
            "unbearable: a timetable would have needed a column for every station. "
            "So the globe was cut into strips, roughly fifteen degrees wide, that share a clock and differ from their "
            "neighbours by an hour. In practice the borders follow those of countries, and some use half or quarter "
            "hours.",
            "What happens at the date line?",
            "The date changes. Crossing it to the west you skip a day, crossing it to the east you live the same day "
            "twice; the time of day hardly changes."),
    Concept("what an algorithm is",
            "A recipe precise enough that a machine can follow it and sure to come to an end.",
            "An algorithm is a finite list of clear steps that turns an input into an output. A cooking recipe nearly "
            "is one, but \"season to taste\" leaves a choice to the cook, and an algorithm must not. Long division, "
            "looking up a name in a sorted list and finding the shortest way through a city can all be written down "
            "in this manner. "
            "Two algorithms for the same problem may differ hugely in effort. That is why people measure how the "
            "number of steps grows with the size of the input and not how long one run took.",
            "Is every problem solvable that way?",
            "No. There is, for example, no algorithm that can tell for every program whether it will ever stop. That "
            "was proved before electronic computers existed."),
    Concept("how soap cleans",
            "Its molecules hold on to grease with one end and to water with the other.",
            "Water alone runs off grease, because the two do not mix. A soap molecule has a long tail that mixes with "
            "fat and a head that mixes with water. Many of them surround a droplet of grease with their tails inside "
            "and their heads outside. "
            "To the water the droplet now looks like something it can carry, and rinsing takes it away. Rubbing helps "
            "to break the grease into droplets; warm water makes it softer.",
            "Why does soap foam less in hard water?",
            "Hard water contains calcium and magnesium, which bind to the soap as a grey scum. Only what is left over "
            "can clean and foam."),
    Concept("the difference between mean and median",
            "The mean shares everything out evenly; the median is the value in the middle.",
            "Ten people sit in a café and earn about the same. The mean income and the median are then close "
            "together. Now a billionaire walks in. The mean leaps to many millions, though nobody got richer; the "
            "median hardly moves, since it only asks who sits in the middle of the row. "
            "That is why house prices and incomes are usually described by the median. The mean is better when the "
            "total matters: who wants to know how much bread to buy needs the average appetite.",
            "Can the two be equal?",
            "Yes, whenever the values lie evenly on both sides of the middle, for example in 2, 4, 6."),
    Concept("how a battery stores energy",
            "Two materials that want to exchange electrons are kept apart until a wire lets them.",
            "Inside a battery are two different materials with a liquid or paste between them. One gives up electrons "
            "easily, the other is glad to take them. The paste lets charged atoms through but no electrons, so these "
            "have to take the way outside, through the lamp or the motor. "
            "When one of the materials is used up, the battery is flat. In a rechargeable one the reaction can be "
            "driven backwards by pushing electrons the other way.",
            "Why do they get weak in the cold?",
            "The reactions and the movement of the charged atoms slow down, so less current can flow. Most of the "
            "energy is still there and comes back with the warmth."),
    Concept("what a checksum is",
            "A short number computed from data, which shows when the data has changed.",
            "Whoever sends data adds a small number that was computed from all of it. The receiver computes it again "
            "and compares. If one bit was flipped on the way, the numbers differ. The last digit of many account and "
            "book numbers works like that and catches most typing errors. "
            "Simple checksums find accidents. Against somebody who changes the data on purpose one needs a "
            "cryptographic digest, for which nobody knows how to find two inputs with the same result.",
            "If the checksum fits, is the data certainly right?",
            "No, only very probably. There are more possible files than checksums, so different files must share "
            "some. With 256 bits an accident is out of the question in practice."),
    Concept("why leaves turn yellow in autumn",
            "The green is taken down, and yellow that was there all along becomes visible.",
            "Leaves are green because of chlorophyll, which catches light. Making it costs the tree nitrogen. When "
            "days get short, the tree dismantles the chlorophyll and stores what is valuable in its wood. The yellow "
            "pigments, which had been hidden by the green, stay behind. "
            "Red is different: some trees make it anew in autumn, probably as a sunshade that protects the leaf while "
            "it is being emptied. At last a layer of cork closes off the stalk, and the wind does the rest.",
            "Why do needles stay green?",
            "They are narrow and waxed, lose little water, and contain substances that lower their freezing point. So "
            "most conifers can afford to keep them for years."),
    Concept("what an API is",
            "An agreement on how one program may ask another for something.",
            "A restaurant guest does not walk into the kitchen; there is a menu, and there are waiters. An API is the "
            "menu of a program: which requests there are, what they need and what comes back. As long as the menu "
            "stays the same, the kitchen can be rebuilt without any guest noticing. "
            "A good one is small, consistent, and hard to use wrongly. Changing it is expensive, because others "
            "depend on it; hence versions, and hence the advice to promise little at the start.",
            "What does REST have to do with it?",
            "REST is a style for APIs on the web: things have addresses, and a few verbs such as GET and DELETE act "
            "on them."),
    Concept("how the seasons come about",
            "The axis of the Earth is tilted, so each half leans towards the Sun for part of the year.",
            "Many people think that summer comes when the Earth is closest to the Sun. In fact it is closest in early "
            "January. What matters is the tilt of the axis, about 23 degrees, which keeps its direction in space all "
            "year round. "
            "In June the northern half leans towards the Sun: days are long, and light falls steeply, so each square "
            "metre receives more of it. Half a year later it is the other way round. Near the equator the tilt "
            "changes little, and the year is divided by rain and not by warmth.",
            "Why is the hottest time not on the longest day?",
            "Land and sea need time to warm up, like a pot on the stove. As long as more heat comes in than goes out, "
            "it still gets warmer, and that lasts some weeks past the longest day."),
    Concept("how noise-cancelling headphones work",
            "They play the opposite of the outside noise, and the two waves cancel out.",
            "Sound is a rhythm of higher and lower pressure. A microphone on the headphone hears the noise from "
            "outside, and a small computer plays the same wave upside down: low pressure where the noise has high. "
            "Both meet at the ear and nearly cancel. "
            "That works well for steady, deep sounds such as engines, which are easy to foresee. For voices and "
            "clatter the computer is too slow by a fraction of a millisecond, and there the padding has to do the "
            "work.",
            "Is the sound energy lost?",
            "No. It is spread differently: quiet at your ear, a little louder elsewhere, and the loudspeaker spends "
            "energy to do it."),
    Concept("what a budget is for",
            "It decides in advance where the money should go, so that surprises do not decide it.",
            "A budget lists what comes in and what goes out during a month. Fixed costs come first: rent, insurance, "
            "tickets. Then come those that vary, such as food, and finally what happens once a year and is forgotten "
            "for eleven months. Divide yearly bills by twelve and put that much aside each month. "
            "The point is not thrift as such. Who knows what is already spoken for can spend the rest without a bad "
            "conscience.",
            "How large should the reserve be?",
            "A common rule is three months of fixed costs. Start with one; the first broken washing machine will show "
            "what it is good for."),
    Concept("the water cycle",
            "The Sun lifts water into the air, and gravity brings it back through rain and rivers.",
            "Sunlight warms the sea, and water evaporates; the salt stays behind. The vapour rises with warm air, "
            "cools, and condenses on specks of dust into droplets that we see as clouds. When these grow heavy they "
            "fall as rain or snow. "
            "Part of it runs off in rivers, part seeps into the ground and comes out of springs years later, and a "
            "good deal is drunk by plants and breathed out through their leaves. In the end it reaches the sea again.",
            "How long does a drop stay in the air?",
            "About nine days on average. In the deep sea it is more like thousands of years."),
    Concept("how to read a box plot",
            "The box holds the middle half of the values, the line in it is the median.",
            "A box plot shows a whole set of numbers in one small drawing. The box reaches from the lower to the "
            "upper quartile, so half of all values lie inside it. The line across the box is the median. The whiskers "
            "reach to the farthest values that still count as ordinary; single dots beyond them are outliers. "
            "Put several side by side and you see at once which group is higher and which is more spread out. What it "
            "hides is the shape: two humps look the same as one.",
            "When do values count as outliers?",
            "By the usual convention, when they are more than one and a half box lengths away from the box. That is a "
            "rule for drawing and no proof of an error."),
    Concept("why ice floats",
            "Water takes up more room when it freezes, so ice is lighter than the water around it.",
            "Most substances shrink when they become solid. In ice, however, each water molecule holds four "
            "neighbours at a fixed distance, and the lattice that results has wide gaps. Liquid water is packed more "
            "tightly. Ice therefore weighs about a twelfth less than the same volume of water and floats with most of "
            "its body below the surface. "
            "This matters for every pond. Ice stays on top and keeps the cold out, and the densest water, at 4 °C, "
            "lies at the bottom, where fish get through the winter.",
            "Does melting sea ice raise the sea?",
            "Hardly, because floating ice already displaces its own weight. Ice on land is another matter: when it "
            "melts, water is added."),
)  # fmt: skip


def concept(d: Desk) -> Dialogue:
    c = d.deal("concept", CONCEPTS)
    ask = d.pick(
        [
            "Explain {}.",
            "Can you explain {}?",
            "I would like to understand {}.",
            "In simple words: {}.",
            "My son asks about this: {}. What do I tell him?",
            "Write a paragraph on {}.",
            "Tell me about this, please: {}.",
        ]
    )
    turns = [(asked(d, ask.format(c.topic)), c.text), (c.ask, c.answer)]
    if d.chance(0.3):
        turns.append(
            (d.pick(["Sum it up in one sentence.", "One sentence for my notes?", "And the short version?"]), c.gist)
        )
    return Dialogue(turns, c.gist)
