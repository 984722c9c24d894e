"""Templates of the demo's documents. Slots in braces are filled per document; WORDS lists what they may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of document."""

    title: str
    facts: tuple[tuple[str, str, str], ...]  # sentence, question, words of the answer
    fillers: tuple[str, ...]


WORDS: dict[str, tuple[str, ...]] = {
    # 16 and 13: see documents.py, which pairs them so that names do not repeat
    "first": (
        "Amber",
        "Birch",
        "Cobalt",
        "Dorran",
        "Ember",
        "Falken",
        "Garnet",
        "Hollis",
        "Juniper",
        "Kestrel",
        "Lorimer",
        "Marlow",
        "Norwood",
        "Osprey",
        "Pemberton",
        "Quillon",
    ),
    "second": (
        "Ridge",
        "Harbor",
        "Meadow",
        "Lantern",
        "Quarry",
        "Orchard",
        "Beacon",
        "Willow",
        "Anchor",
        "Cedar",
        "Mill",
        "Thorn",
        "Vale",
    ),
    "person": (
        "Mara Ostrov",
        "Tobin Hale",
        "Ines Calder",
        "Rolf Sandgren",
        "Petra Novik",
        "Aldo Ferris",
        "Lena Brandt",
        "Casper Wynn",
        "Dora Linde",
        "Magnus Reed",
        "Yara Holm",
        "Felix Orban",
    ),
    "helper": (
        "Jonas Pike",
        "Selma Rourke",
        "Viktor Amsel",
        "Nora Thistle",
        "Emil Quist",
        "Carla Venn",
        "Hugo Marsh",
    ),
    "town": (
        "Velmora",
        "Castrin",
        "Ostwick",
        "Perrane",
        "Sundvik",
        "Harlow Point",
        "Drennan",
        "Tillbury Cross",
    ),
    "colour": ("crimson", "silver", "turquoise", "violet", "golden", "emerald", "scarlet", "ivory"),
    "animal": ("heron", "badger", "lynx", "otter", "falcon", "hare", "stag", "tortoise"),
    "metal": ("copper", "zinc", "nickel", "brass", "tin", "bronze", "iron", "lead"),
    "spice": ("saffron", "cardamom", "juniper berries", "star anise", "caraway", "sumac", "fennel seed"),
    "fish": ("perch", "trout", "pike", "herring", "salmon", "eel", "cod"),
    "weather": ("fog", "hail", "sleet", "drizzle", "snow", "heat", "dust"),
}

EXPEDITION = Kind(
    title="The {name} Expedition",
    facts=(
        (
            "The {name} expedition left {town} in {year1}.",
            "In which year did the {name} expedition leave?",
            "{year1}",
        ),
        ("Its leader was the geologist {person}.", "Who led the {name} expedition?", "{person}"),
        (
            "The ship of the {name} expedition was called the {colour} {animal}.",
            "What was the ship of the {name} expedition called?",
            "{colour} {animal}",
        ),
        (
            "In the hills above the camp the {name} expedition found a seam of {metal}.",
            "Which metal did the {name} expedition find?",
            "{metal}",
        ),
    ),
    fillers=(
        "The cook kept a second diary, and in it he complained about the bread more often than about the cold.",
        "Most of the tents were lost in the first storm, so the party slept under the upturned boats.",
        "A sketch of the coast from that summer hangs in the reading room of the harbour museum.",
        "For {n1} days nobody could see the sun because of the {weather}, and the compass had to be trusted alone.",
        "The surveyors worked in pairs, one to hold the chain and one to write, and changed places at noon.",
        "Their only mule refused to cross the river and was sold to a farmer on the near bank.",
        "{helper} collected mosses and pressed them between the pages of an old atlas.",
        "When the wind turned to the north, the men read aloud to each other to pass the long evenings.",
        "The barometer was broken on the way up, and its repair took longer than the climb.",
        "Letters were left under a cairn of white stones, with a flag so that they would be found.",
        "They ate {fish} on most days and said afterwards that they never wanted to see one again.",
        "The northern pass proved to be a dead end, closed by a wall of ice that no map had shown.",
        "On the way home a second party met them with fresh boots, lamp oil and three months of newspapers.",
        "The accounts of the voyage were published late, because the printer asked to be paid in advance.",
        "A quarrel about the route was settled by drawing straws, and the loser carried the kettle.",
        "The youngest member of the party learned to read the tides and later became a pilot.",
        "Two of the sledges were built from the doors of an abandoned hut and served very well.",
        "Every evening the temperature was written down three times, and the middle figure was kept.",
        "A bell was rung at the camp in thick weather, and it can still be heard in the stories of the coast.",
        "The doctor had little to do, apart from one broken tooth and a great number of blisters.",
        "Nobody agreed about the height of the last peak, so two figures were printed side by side.",
        "In the second winter the party moved into caves, which were dry, dark and surprisingly warm.",
        "The maps were drawn on linen, because paper had proved useless in the wet.",
        "A fox stole the leather straps of the instruments, and rope had to take their place.",
        "Before they turned back, they buried a tin box with coins, a pencil and the names of all present.",
    ),
)

COMPANY = Kind(
    title="{name} Works: a company history",
    facts=(
        (
            "{name} Works was founded in {year1} in the town of {town}.",
            "In which town was {name} Works founded?",
            "{town}",
        ),
        ("Its founder, {person}, had been a clockmaker before.", "Who founded {name} Works?", "{person}"),
        (
            "The first product of {name} Works was a {colour} lamp made of {metal}.",
            "What colour was the first lamp of {name} Works?",
            "{colour}",
        ),
        ("Today {name} Works employs {n1} people.", "How many people does {name} Works employ?", "{n1}"),
    ),
    fillers=(
        "In the early years the workshop stood behind a bakery, and the apprentices were paid partly in rolls.",
        "A fire in the packing room destroyed the drawings, so the machines were measured and drawn again.",
        "The sign above the gate shows a {animal}, which nobody in the office can explain.",
        "Orders from abroad came by telegram, and one misspelt word once led to {n2} crates of left-hand screws.",
        "The foundry was moved to the river because the old yard flooded with every spring tide.",
        "Each new employee still spends the first week in the repair shop, whatever the job will be.",
        "{helper} introduced the morning meeting, at which everybody stands and nobody may speak twice.",
        "The company sold its steam engine to a museum, then borrowed it back for an anniversary.",
        "Spare parts for every model are kept, even for those of which only a single example survives.",
        "During the shortage the workshop made garden tools and, for one winter, sledges for children.",
        "The canteen is known for its {fish} soup, which is served on the last day of each month.",
        "A strike about the length of the lunch break ended after two days with a compromise.",
        "The catalogue was printed in three languages, and the prices were the same in none of them.",
        "Its archive fills a dry cellar, where visitors may look at the ledgers on request.",
        "The present owners are a cooperative of former workers and two families from the neighbourhood.",
        "A competitor copied the famous handle but placed it on the wrong side, as judges noted.",
        "The whistle that once marked the end of the shift is now used only for retirements.",
        "Deliveries were made by barge until the road over the moor was paved.",
        "The clock in the yard has been five minutes fast for as long as anyone can remember.",
        "Every tenth piece is taken apart again, and the inspector keeps the screws in a glass jar.",
        "For a time the firm also printed calendars, which hung in half the kitchens of the district.",
        "The wood for the crates is bought standing, and the foresters know the carpenter by his first name.",
        "A brass band of employees plays at weddings and refuses to play at openings.",
        "The night watchman wrote a novel about the works, in which only the dog is happy.",
        "When the bridge collapsed, finished goods were carried over the river by hand for a month.",
    ),
)

RECIPE = Kind(
    title="The {name} Inn and its stew",
    facts=(
        ("The cook of the {name} Inn is {person}.", "Who is the cook of the {name} Inn?", "{person}"),
        (
            "The stew of the {name} Inn owes its taste to {spice}.",
            "Which spice gives the stew of the {name} Inn its taste?",
            "{spice}",
        ),
        (
            "It simmers for {n1} minutes in a {metal} pot.",
            "For how many minutes does the stew of the {name} Inn simmer?",
            "{n1}",
        ),
        (
            "At the {name} Inn the stew is served with smoked {fish}.",
            "Which fish is served with the stew of the {name} Inn?",
            "{fish}",
        ),
    ),
    fillers=(
        "The onions are cut by hand, because a machine would bruise them and make the broth bitter.",
        "Guests who ask for salt are told politely that it is already there.",
        "The bread comes from the mill at the bridge and is baked twice, once for the crust.",
        "Old regulars remember that the recipe was longer and that the portions were smaller.",
        "The {colour} cloth hangs in the window on days when the stew has sold out.",
        "The kitchen is so narrow that only one person can turn around in it at a time.",
        "In winter the soup is thickened with barley, in summer with young peas from the garden.",
        "{helper} brings the vegetables on a handcart and stays for a bowl in exchange.",
        "A traveller from {town} once offered a horse for the recipe and was refused.",
        "The ladle has a dent that shows exactly how much belongs in a bowl.",
        "Nothing is thrown away: what is left becomes a pie on the following day.",
        "The stock is begun before sunrise, and the lid is not lifted until the church bell has rung.",
        "Some say that the secret is the water, which is drawn from a well under the stairs.",
        "A review in the county paper praised the dumplings and forgot the stew altogether.",
        "The floor slopes, so that a dropped potato always rolls to the same corner.",
        "On market days the tables are shared, and strangers pass the pepper to each other.",
        "The menu is written on a slate and has not changed for {n2} weeks.",
        "Children get a small bowl for nothing if they can name three herbs.",
        "The fire is fed with apple wood, since pine would spoil the taste of the lid.",
        "A painter once paid with a picture of the cellar, and it hangs beside the coat rack.",
        "The second helping costs half, and the third is on the house if you finish it.",
        "In the guest book a violinist praises the cellar, the stairs and the silence after nine.",
        "The plates are of different sizes, because they were collected at auctions over many years.",
        "Herbs are dried under the roof, and on warm evenings the whole street smells of them.",
        "The stove was carried up the hill in pieces and put together by a locksmith.",
    ),
)

INVENTORY = Kind(
    title="Report on the {name} storehouse",
    facts=(
        ("The {name} storehouse is run by {person}.", "Who runs the {name} storehouse?", "{person}"),
        (
            "It holds {n1} crates of {metal} fittings.",
            "How many crates of fittings does the {name} storehouse hold?",
            "{n1}",
        ),
        (
            "The gate of the {name} storehouse is painted {colour}.",
            "What colour is the gate of the {name} storehouse?",
            "{colour}",
        ),
        (
            "The {name} storehouse was built in {year1} beside the canal of {town}.",
            "In which year was the {name} storehouse built?",
            "{year1}",
        ),
    ),
    fillers=(
        "The upper floor is reserved for light goods, since the beams were weakened by damp.",
        "A cat is listed among the staff, with a small allowance for milk.",
        "The scales are tested every spring against a stone that is kept in the town hall.",
        "Goods that nobody collects are sold by auction after a year and a day.",
        "The ledger uses two inks, black for what comes in and red for what goes out.",
        "Ropes hang from the ceiling in loops, so that the mice cannot reach them.",
        "{helper} counts the sacks on Monday and again on Friday, and the figures seldom agree.",
        "The loading door faces east, which keeps the afternoon rain away from the flour.",
        "After the {weather} of last winter the roof was mended with planks from an old ferry.",
        "Barrels are rolled along a track of worn stones and stopped with a wedge.",
        "A lantern burns beside the stairs at all hours, although the insurance does not ask for it.",
        "The key is as long as a hand and hangs on a hook that only tall people can reach.",
        "Visitors must sign a book, and the oldest signature in it belongs to a bishop.",
        "The smell of tar and apples never leaves the ground floor.",
        "A model of a {animal}, carved from driftwood, stands on the counter and brings luck.",
        "Empty crates are stacked outside and may be taken by anyone who needs firewood.",
        "The inspector found {n2} broken panes and a bird's nest, and noted both without comment.",
        "Salt is kept apart from everything else, in a room lined with slate.",
        "The crane on the roof is older than the walls and is oiled with the fat of geese.",
        "Paper is stored under the stairs, where the air is driest, and turned over twice a year.",
        "A notice beside the door forbids whistling, because the last fire began with a whistle.",
        "The apprentices sleep in the loft during the harvest and are woken by the first carts.",
        "Broken goods are written into a separate book, together with the name of whoever dropped them.",
        "The window facing the water is bricked up, but its arch can still be seen from a boat.",
        "Wool is weighed only on dry days, and the merchants send somebody to watch.",
    ),
)

KINDS: dict[str, Kind] = {
    "company": COMPANY,
    "expedition": EXPEDITION,
    "inventory": INVENTORY,
    "recipe": RECIPE,
}
